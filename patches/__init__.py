"""Architecture adapters: one file each, found by ``config.model_type`` through ``rope_ext.registry``."""

"""How the prompts of RULER are made: one file per kind of task."""

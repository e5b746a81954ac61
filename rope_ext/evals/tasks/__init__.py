"""What is measured: one file per task."""

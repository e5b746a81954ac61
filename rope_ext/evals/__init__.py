"""Long-context evaluations."""

"""Position encodings: the maths. Imports torch only, knows no architecture."""

"""Runnable scripts."""

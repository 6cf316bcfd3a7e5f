"""Verbs about what a run has recorded."""

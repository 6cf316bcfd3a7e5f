"""Readers of versions: fetch, stage, prepare, write, undo, verify."""

"""Checkpoints of a run: registration, retention, resume point and start weights."""

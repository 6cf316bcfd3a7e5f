"""Checkpoints of a run: cadence, requests, writing, recovery."""

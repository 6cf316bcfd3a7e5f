"""Spec and status of a Checkpoint."""

"""Reconciliation of checkpoints, and the Jobs that verify or delete their data."""

"""Spec and status of an RLRun."""

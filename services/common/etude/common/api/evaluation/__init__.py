"""Spec and status of an EvalRun."""

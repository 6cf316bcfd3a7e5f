"""Spec and status of an EnvPool."""

"""Compactor."""

"""Swap."""

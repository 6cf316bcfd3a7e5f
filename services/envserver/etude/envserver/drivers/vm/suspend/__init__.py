"""Suspend."""

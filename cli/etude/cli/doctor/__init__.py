"""Checks of this host."""

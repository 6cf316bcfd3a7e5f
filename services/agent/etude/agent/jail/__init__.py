"""Jail."""

"""Sandbox drivers: one protocol, one implementation for each isolation boundary."""

"""Swap of weights between two forward passes: two-phase commit over all ranks."""

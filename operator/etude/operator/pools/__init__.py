"""Reconciliation of environment pools: observe, size, decide, report."""

"""Reconciliation of runs: observe, decide, report."""

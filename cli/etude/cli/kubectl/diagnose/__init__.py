"""Diagnosis of runs: observed objects, blockers and advice."""

"""Verbs of the production loop: work with a served policy, its feedback, experiments, releases."""

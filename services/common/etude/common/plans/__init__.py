"""Rollout plans of runs: their registry, and the demand that they forecast."""

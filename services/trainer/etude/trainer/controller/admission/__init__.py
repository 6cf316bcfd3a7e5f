"""Rollout buffer: which groups start, which are trained, which are dropped."""

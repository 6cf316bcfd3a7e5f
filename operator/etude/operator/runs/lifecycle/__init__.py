"""Lifecycle of a run: intents, failure policy, limits, final checkpoint and cleanup."""

"""Experts of tokens in the learner: replayed from records, or from an earlier pass."""

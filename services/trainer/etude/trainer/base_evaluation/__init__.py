"""Evaluation of base models, before a run chooses one: perplexity, knowledge, state tracking."""

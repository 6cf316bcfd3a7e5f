"""Curricula: pure functions that say which untrained tasks of a phase come next."""

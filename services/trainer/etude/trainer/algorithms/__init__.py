"""Algorithms: an advantage, a surrogate and an aggregation each, one small file per algorithm."""

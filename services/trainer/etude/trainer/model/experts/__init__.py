"""Mixtures of experts: their division over ranks, and replay of their routers."""

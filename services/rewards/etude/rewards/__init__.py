"""Rewards: finished rollouts in, numbers with their parts out."""

"""Reward functions, one file each."""

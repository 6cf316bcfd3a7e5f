"""Reward service: scores finished rollouts with a rubric of reward functions."""

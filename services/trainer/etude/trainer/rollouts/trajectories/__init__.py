"""Trajectory log: turns of rollouts under way, so that a rollout outlives its worker."""

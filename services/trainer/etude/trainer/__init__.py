"""The trainer: one controller, its rollout workers and its learner ranks."""

"""New rewards of recorded rollouts, by another rubric."""

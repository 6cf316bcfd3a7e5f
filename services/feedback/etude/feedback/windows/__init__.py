"""Windows: rollouts of a served version with their credit, closed once, for training."""

"""Memory of a learner rank, planned by running its step on tensors without values."""

"""Detection of reward hacks: signs in a rollout's accesses, changes and calls, then a judge."""

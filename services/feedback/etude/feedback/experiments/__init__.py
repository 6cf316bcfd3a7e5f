"""Statistics of experiments on users: pure functions from sums over users to verdicts."""

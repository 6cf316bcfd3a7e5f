"""EvalRun: engines of one version, a reward service and a Job that drives rollouts."""

"""Evaluation of policies on suites of tasks: scores, comparisons by task, the evaluation gate."""

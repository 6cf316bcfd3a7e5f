"""Suites of tasks that evaluations run, and what came of them."""

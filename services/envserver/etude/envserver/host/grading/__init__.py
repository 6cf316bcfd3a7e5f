"""Grading of a change in a sandbox that no agent has run in."""

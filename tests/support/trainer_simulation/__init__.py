"""Simulated learners and rollout workers for tests of the controller."""

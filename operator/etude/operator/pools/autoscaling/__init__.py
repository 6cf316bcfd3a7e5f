"""Autoscaling of environment pools: pure decisions without I/O and without a clock."""

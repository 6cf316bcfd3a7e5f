"""Simulated windows of rollouts for bench/monitors.py, and policies that learn to game."""

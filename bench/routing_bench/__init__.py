"""Simulated engines in virtual time, for bench/routing.py."""

"""Attacks on rewards with their honest twins, and the real environments in which they are tried."""

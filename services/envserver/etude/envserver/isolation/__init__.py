"""Isolation primitives that drivers, guests and images share: system calls, limits, users."""

"""Measurements of environments against their goals: one module for each kind."""

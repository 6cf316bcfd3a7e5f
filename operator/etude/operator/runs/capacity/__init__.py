"""Capacity of a run: quota, gangs, idle roles, engine count and disruptions."""

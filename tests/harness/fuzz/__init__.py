"""Hostile frames by the million: at parsers, channels, a live node, and the guest's agent."""

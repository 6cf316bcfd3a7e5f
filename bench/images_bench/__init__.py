"""Pools whose tasks have an image each, measured from launch to the first tool call."""

"""Openenv."""

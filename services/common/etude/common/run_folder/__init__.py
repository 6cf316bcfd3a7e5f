"""Run folder."""

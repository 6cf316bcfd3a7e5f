"""Environments that people use by hand."""

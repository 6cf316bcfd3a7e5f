"""Environments that people use by hand: kept, found, talked to."""

"""Recorded turns: their log, and their encryption."""

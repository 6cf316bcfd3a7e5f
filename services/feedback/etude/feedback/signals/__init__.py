"""Signals: what users' events say about each served rollout."""

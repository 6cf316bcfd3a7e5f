"""Feedback service: events of users become signals, windows and decisions about candidates."""

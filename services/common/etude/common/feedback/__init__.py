"""Feedback of users: the events that clients send and that services read."""

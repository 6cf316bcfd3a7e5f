"""Conversations of `etude agent` on a terminal."""

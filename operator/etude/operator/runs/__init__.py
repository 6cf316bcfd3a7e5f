"""What to do about a run, and what to say about it."""

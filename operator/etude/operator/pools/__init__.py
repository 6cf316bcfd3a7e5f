"""What to do about a pool of environments."""

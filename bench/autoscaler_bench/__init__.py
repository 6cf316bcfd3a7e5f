"""A simulated pool of environments, runs that ask it for them, and what sizes it."""

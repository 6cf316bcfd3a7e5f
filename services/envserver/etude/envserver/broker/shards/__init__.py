"""Several brokers of one pool: each has hosts of its own, and all take every call."""

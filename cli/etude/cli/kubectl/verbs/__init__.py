"""The verbs of `kubectl etude`."""

"""Experiments on users: the rule by which gateway and analysis agree on arms."""

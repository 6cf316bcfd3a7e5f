"""Jail of programs that run on the host over bytes of a policy."""

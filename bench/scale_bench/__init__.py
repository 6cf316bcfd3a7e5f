"""Thousands of simulated nodes and the clients of one run, against real brokers."""

"""A sandbox host: holds leases, runs their environments, answers to the brokers."""

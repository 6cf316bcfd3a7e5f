"""Simulated users: they work with a served policy, and send events as a product's clients do."""

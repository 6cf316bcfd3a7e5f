"""Brokers of environment pools: shards, owners of run ids, descriptions."""

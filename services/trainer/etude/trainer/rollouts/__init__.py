"""Rollout workers: clients, leases, failover, scoring."""

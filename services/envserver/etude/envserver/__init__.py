"""Environments: a broker that grants leases, hosts that run tools and graders in isolation."""

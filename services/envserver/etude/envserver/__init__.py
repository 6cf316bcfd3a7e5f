"""Environments: a broker that grants leases, nodes that run tools and graders behind walls."""

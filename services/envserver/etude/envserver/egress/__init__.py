"""Egress of environments: a forward proxy on the host that allows the hosts that a pool lists."""

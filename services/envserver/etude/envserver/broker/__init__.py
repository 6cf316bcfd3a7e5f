"""The broker of one pool: who gets which environment, on which node, for how long."""

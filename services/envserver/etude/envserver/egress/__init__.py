"""The one way out of an environment: a proxy of the node's that lets through what a pool lists."""

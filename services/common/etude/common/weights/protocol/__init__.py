"""Versions in the object store: epochs, manifests, the chain, plans, leases, collection."""

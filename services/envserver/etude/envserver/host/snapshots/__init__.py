"""Snapshots of a host: local ones, the shared store, pause and rollback."""

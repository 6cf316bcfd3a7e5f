"""Firecracker driver: microVMs, each in a jail built by Firecracker's jailer."""

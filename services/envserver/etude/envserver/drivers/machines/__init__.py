"""Shared half of the microVM drivers: warm pool, start scheduler, suspend, snapshots, adoption."""

"""Suspend and resume of VMs: idle policy, suspend to disk, snapshots."""

"""Firecracker."""

"""Offline validation of manifests."""

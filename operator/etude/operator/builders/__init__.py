"""Builders of Kubernetes manifests: pure functions from specs to desired objects."""

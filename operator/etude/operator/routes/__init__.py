"""Reconciliation of routes."""

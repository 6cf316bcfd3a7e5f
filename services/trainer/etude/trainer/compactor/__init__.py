"""Compactor of published weights: keyframes, skips, garbage collection."""

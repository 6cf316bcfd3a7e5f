"""Updates."""

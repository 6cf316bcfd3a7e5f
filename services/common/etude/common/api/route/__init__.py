"""PolicyRoute: specification and status."""

"""Fork server."""

"""Client of a route's releases."""

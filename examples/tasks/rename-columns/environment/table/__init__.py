"""Tables from CSV text."""

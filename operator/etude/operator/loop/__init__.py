"""How changes become passes, and passes become writes."""

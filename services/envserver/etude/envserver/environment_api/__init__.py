"""Environment api."""

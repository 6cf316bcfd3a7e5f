"""Views of runs in a terminal."""

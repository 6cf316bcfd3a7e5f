"""The report of a run: curves as pictures and one page to read."""

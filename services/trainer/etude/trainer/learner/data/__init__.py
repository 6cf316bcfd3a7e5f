"""Data of supervised phases that are larger than memory: read in blocks, packed, and resumable."""

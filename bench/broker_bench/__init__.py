"""Parts of bench/placements.py."""

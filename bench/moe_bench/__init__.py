"""Parts of bench/moe.py."""

"""Parts of bench/demo_variants.py."""

"""Parts of bench/gateway.py."""

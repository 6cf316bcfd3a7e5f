"""Parts of bench/long_rollouts.py."""

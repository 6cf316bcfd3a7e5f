"""Parts of bench/learner.py and bench/trl_comparison.py."""

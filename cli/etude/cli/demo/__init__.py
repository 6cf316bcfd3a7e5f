"""The one-command demo: its inputs, its targets, its verdict."""

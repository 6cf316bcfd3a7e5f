"""Commands: programs to run with `python -m`."""

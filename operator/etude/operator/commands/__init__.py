"""Commands: programs beside the operator, run with `python -m`."""

"""Programs of their own, each `python -m etude.feedback.commands.<name>`."""

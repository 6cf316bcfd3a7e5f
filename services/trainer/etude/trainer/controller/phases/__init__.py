"""Training phases, their evaluations and their end."""

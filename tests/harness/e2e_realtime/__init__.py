"""A route on a real node, from its first version to a promotion and a roll-back."""

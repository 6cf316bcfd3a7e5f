"""Gateway: serves a policy to users over the protocols of their clients, and records its turns."""

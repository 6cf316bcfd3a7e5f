"""Contents of finished rollouts, as their worker writes them."""

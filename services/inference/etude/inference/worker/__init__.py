"""What runs inside vLLM's workers: the map to the live parameters, and what writes them."""

"""Code inside vLLM's workers: the weight map, and writes into the live parameters."""

"""The vLLM engine of a replica: the only door to vLLM beside its plugin."""

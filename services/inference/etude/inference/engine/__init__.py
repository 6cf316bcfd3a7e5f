"""The engine of a replica: its interface, vLLM's implementation and plugin, a fake for tests."""

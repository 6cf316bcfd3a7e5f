"""The policy as a torch module, its FSDP2 sharding, and the layout of its checkpoint."""

"""Process driver: commands in namespaces; its server uses the standard library only."""

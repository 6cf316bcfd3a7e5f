"""Programs inside the process driver's namespaces: standard library only, started by path."""

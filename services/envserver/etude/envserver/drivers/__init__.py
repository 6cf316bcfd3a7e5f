"""How environments are walled in: one protocol, one module per driver."""

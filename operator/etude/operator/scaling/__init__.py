"""How many replicas a pool of environments should have, decided without I/O and without a clock."""

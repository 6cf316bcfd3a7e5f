"""What runs say that they will ask of a pool, and what follows from it."""

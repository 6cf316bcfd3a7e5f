"""Parts of bench/oracles.py: cases, our gradients, exact enumerations, and other code bases."""

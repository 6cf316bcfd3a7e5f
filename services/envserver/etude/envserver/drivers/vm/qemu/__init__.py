"""QEMU driver: microVMs cloned from sealed memory and saved as small deltas."""

"""MicroVMs in QEMU: booted once, then cloned from a sealed memory and saved as small deltas."""

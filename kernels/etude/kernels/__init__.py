"""GPU kernels, each beside its reference."""

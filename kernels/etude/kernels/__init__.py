"""GPU kernels, each with its reference."""

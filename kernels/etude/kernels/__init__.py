"""GPU kernels, each beside its reference; none is built yet."""

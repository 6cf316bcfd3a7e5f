"""Live words of parameters on a device."""

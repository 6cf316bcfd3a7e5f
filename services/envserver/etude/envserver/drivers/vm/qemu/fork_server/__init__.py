"""Fork server of QEMU VMs: child VMs forked from a running clone by a preloaded C library."""

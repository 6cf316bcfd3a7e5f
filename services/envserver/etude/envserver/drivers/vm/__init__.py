"""MicroVM drivers: the half that all VMMs share, and QEMU and Firecracker in their own folders."""

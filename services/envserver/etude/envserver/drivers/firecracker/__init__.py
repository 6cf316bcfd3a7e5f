"""Machines of Firecracker, each in a jail that its jailer builds."""

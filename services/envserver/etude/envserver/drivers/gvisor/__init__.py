"""gVisor driver: sandboxes as containers with a kernel in user space."""

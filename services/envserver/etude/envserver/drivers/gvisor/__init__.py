"""Sandboxes of gVisor: a kernel in user space between an environment and the host's."""

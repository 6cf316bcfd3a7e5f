"""Images: a kernel, an initramfs and a read-only root file system, built from a spec and cached."""

"""Images: a kernel, an initramfs and a read-only root file system, made from a spec and kept."""

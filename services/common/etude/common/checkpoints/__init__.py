"""Checkpoints in the object store, and the jobs that verify and delete them."""

"""Qemu."""

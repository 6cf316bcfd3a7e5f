"""A Firecracker that is none: its API, its jailer's, and the socket of its guest, over QEMU.

It promises what Firecracker 1.13 documents and no more (see rules.py for the sources), so that the
driver can be run from end to end where there is no KVM.
"""

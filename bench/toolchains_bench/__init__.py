"""Small repositories with a bug, one for each toolchain, and Dockerfiles for them."""

"""E2B's API: control plane, and envd's files and processes."""

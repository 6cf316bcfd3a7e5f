"""The seam to Kubernetes: what the operator asks of a cluster, and the real one."""

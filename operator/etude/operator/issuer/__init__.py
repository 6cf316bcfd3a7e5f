"""Signs certificates for pods where the cluster has nobody else for it."""

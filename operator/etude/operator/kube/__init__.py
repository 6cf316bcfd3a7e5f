"""The Kubernetes seam: the interface of a cluster, its API client and a cluster in memory."""

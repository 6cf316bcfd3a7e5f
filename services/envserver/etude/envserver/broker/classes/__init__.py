"""Classes of leases: what each use of a pool gets of its slots."""

"""`kubectl etude`: runs of a cluster, seen and ordered about through the user's kubectl."""

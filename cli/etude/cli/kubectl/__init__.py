"""`kubectl etude`: diagnosis and commands for the runs of a cluster, through the user's kubectl."""

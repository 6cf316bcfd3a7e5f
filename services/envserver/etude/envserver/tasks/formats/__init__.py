"""Other projects' tasks as task folders, and rollouts as another project's traces."""

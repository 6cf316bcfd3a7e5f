"""Tasks: folders in Harbor layout, and the seeded generator of the demo's set."""

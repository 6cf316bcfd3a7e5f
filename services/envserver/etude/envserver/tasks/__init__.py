"""Task tooling: runner, verifier and linter of task folders in Harbor layout."""

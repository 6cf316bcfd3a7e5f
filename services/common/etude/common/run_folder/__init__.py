"""Files that a run leaves in its folder: record, state, lock."""

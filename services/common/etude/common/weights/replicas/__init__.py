"""What a reader does with versions: fetch, stage, prepare, commit, undo, prove."""

"""What to do about a checkpoint, and the Job that handles its data."""

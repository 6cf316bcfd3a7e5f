"""Release: records of the checkpoints that channels serve."""

"""Contents of finished rollouts: objects of the run's store that the controller only refers to."""

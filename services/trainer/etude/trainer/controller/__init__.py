"""The run's single controller: what to sample, what to train on, what is durable."""

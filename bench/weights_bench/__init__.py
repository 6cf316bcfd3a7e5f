"""What it costs to move weights: trajectories, contenders, clocks, tables."""

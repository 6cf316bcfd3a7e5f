"""Questions about code with known answers, for training and judging search."""

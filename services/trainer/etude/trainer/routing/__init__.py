"""Engine routing: the table of engines, and the choice of one for each completion."""

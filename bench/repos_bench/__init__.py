"""Real projects of four package registries, from which tasks are mined."""

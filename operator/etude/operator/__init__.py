"""The control plane: events in, pure decisions, applied objects out."""

"""A run on a real node from installation to uninstallation, with what may happen between."""

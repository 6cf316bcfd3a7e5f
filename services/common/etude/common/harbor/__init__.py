"""Harbor task folders: layout, settings, validation."""

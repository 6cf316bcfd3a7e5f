"""Trees of files on disk and in memory: read, written, copied and packed safely."""

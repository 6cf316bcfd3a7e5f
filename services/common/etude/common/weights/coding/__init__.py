"""Changes of words as bytes: codecs, blocks, containers."""

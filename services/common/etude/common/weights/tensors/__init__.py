"""A policy's tensors as raw words: schema, tiles, digest, files."""

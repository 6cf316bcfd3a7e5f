"""Embedders: vectors of chunks and questions."""

"""Codecs of blocks, one module each."""

"""Monitors of batches and windows: signs that a policy games its reward, one file each."""

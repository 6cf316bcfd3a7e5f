"""Export of weights: published versions as per-rank deltas, and Hugging Face folders."""

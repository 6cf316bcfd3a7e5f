"""CustomResourceDefinitions and reference pages, generated from the API models."""

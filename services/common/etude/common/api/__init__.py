"""The custom resources as pydantic models: the one source of CRDs, lint and reference."""

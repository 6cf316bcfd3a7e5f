"""Shared by every part: API models, object store, RPC, TLS, errors, telemetry."""

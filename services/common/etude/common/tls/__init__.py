"""Mutual TLS: identities, RPC authorization, certificates and their renewal."""

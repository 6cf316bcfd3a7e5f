"""Integrations: APIs of other projects that the operator can use."""

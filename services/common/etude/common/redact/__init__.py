"""Redaction: secrets and personal data are replaced before anything is stored."""

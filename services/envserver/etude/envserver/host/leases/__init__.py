"""Leases of a host: records, results of calls, expiry, starts."""

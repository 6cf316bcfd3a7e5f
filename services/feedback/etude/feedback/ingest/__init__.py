"""Ingest: events arrive over HTTP, are checked, and acknowledged once they are durable."""

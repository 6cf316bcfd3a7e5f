"""Relays: processes that hand events from queues to a feedback service, and from it to logs."""

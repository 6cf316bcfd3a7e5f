"""Reports of a run: status, events, record, and the service that sends them."""

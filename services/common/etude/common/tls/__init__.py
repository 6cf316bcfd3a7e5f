"""Who a process is on the wire, whom it serves, and the certificates that prove it."""

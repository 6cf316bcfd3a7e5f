"""The ledger: encrypted events, consents and erasures in a durable log."""

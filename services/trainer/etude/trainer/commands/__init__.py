"""Commands of their own processes: audit, traces, checkpoint check."""

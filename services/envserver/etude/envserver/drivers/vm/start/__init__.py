"""VM starts: starter, warm pool, start scheduler, CPU budget, crash-loop quarantine."""

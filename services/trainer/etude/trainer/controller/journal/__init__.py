"""Write-ahead journal of a run, and the ledger that it adds up to."""

"""The operator as a process against a real API server, with faults in between."""

"""The run's single controller: admits, journals, trains, publishes, saves and reports."""

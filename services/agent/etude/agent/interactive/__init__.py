"""The production half of the harness: the same turn loop on a user's own folder."""

"""Tables of figures for questions: events, consents, outcomes and windows as Parquet by day."""

"""KEDA's wire, with committed stubs: what it asks of an external scaler."""

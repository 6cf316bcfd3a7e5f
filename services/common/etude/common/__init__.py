"""What every part needs: API models, blob store, wire, errors, telemetry."""

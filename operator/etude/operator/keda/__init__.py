"""What KEDA asks about pools that it sizes."""

"""External scaler for KEDA."""

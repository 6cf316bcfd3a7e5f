"""Multi-token prediction: heads behind the model, and their loss."""

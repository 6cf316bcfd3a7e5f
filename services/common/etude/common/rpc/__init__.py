"""gRPC servers and client channels."""

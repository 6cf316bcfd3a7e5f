"""Code search as a service, for products and for the environments that train on it."""

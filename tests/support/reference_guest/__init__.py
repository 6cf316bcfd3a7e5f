"""Reference implementation of the guest agent in Python, for tests."""

"""Serving of clients: OpenAI endpoint, translation of messages."""

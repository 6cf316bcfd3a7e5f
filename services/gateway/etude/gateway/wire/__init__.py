"""Protocols of clients: OpenAI's chat, text completions and responses, Anthropic's messages."""

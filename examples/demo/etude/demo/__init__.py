"""The demo: a seeded generator of tasks, demonstrations and a tokenizer, and its sandbox image."""

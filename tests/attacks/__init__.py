"""What a hostile policy, or code that it runs, may try: every attack on every driver."""

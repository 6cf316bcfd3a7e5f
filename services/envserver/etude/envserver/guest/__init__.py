"""The host's side of the channel to the agent inside a sandbox."""

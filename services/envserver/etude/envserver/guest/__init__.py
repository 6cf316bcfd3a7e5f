"""The node's side of the channel to the agent inside a sandbox, and a second such agent."""

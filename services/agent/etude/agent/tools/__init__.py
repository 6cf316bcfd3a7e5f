"""The tools of the agent: arguments that check themselves, and run on any workspace."""

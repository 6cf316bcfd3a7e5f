"""Tools of the agent: models of their arguments that run on any workspace."""

"""One node: environments, their tools, their graders."""

"""Paths as the clients of sandboxes write them, and where they lead in a workspace."""

from etude.agent.workspace import relative
from etude.agent.workspace.protocol import HOME

USER_HOME = "/home/user"
"""Where such clients keep their files; here it is the workspace."""


def inside(path: str) -> str:
    """The path below the workspace; what is relative starts there.

    Raises:
        WorkspaceError: it leads out.
    """
    for home in (USER_HOME, HOME, "~"):
        if path == home or path.startswith(home + "/"):
            return relative(path.removeprefix(home).lstrip("/"))
    return relative(path)


def shown(path: str, *, like: str) -> str:
    """A path of the workspace, absolute, below the home that the client itself named."""
    home = HOME if like == HOME or like.startswith(HOME + "/") else USER_HOME
    return f"{home}/{path}" if path else home

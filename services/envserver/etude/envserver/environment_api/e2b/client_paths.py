"""Conversion between the paths of E2B's clients and those of a workspace."""

from etude.agent.workspace import relative_path
from etude.agent.workspace.interface import HOME

USER_HOME = "/home/user"
"""Home of E2B's sandboxes; here it is the workspace."""


def workspace_path(path: str) -> str:
    """Path in the workspace of a client's path; relative paths start there.

    Raises:
        WorkspaceError: it leads out.
    """
    for home in (USER_HOME, HOME, "~"):
        if path == home or path.startswith(home + "/"):
            return relative_path(path.removeprefix(home).lstrip("/"))
    return relative_path(path)


def client_path(path: str, *, like: str) -> str:
    """Absolute path for a client, below the home that the client used."""
    home = HOME if like == HOME or like.startswith(HOME + "/") else USER_HOME
    return f"{home}/{path}" if path else home

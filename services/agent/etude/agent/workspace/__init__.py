"""What tools run on: the files and the shell of one environment."""

from etude.agent.workspace.folder import FolderWorkspace
from etude.agent.workspace.memory import MemoryWorkspace
from etude.agent.workspace.protocol import (
    HOME,
    MAX_FILE_BYTES,
    ExecResult,
    FileInfo,
    FileKind,
    PathFault,
    Runner,
    Workspace,
    WorkspaceError,
    WorkspaceLostError,
    relative,
)

__all__ = [
    "HOME",
    "MAX_FILE_BYTES",
    "ExecResult",
    "FileInfo",
    "FileKind",
    "FolderWorkspace",
    "MemoryWorkspace",
    "PathFault",
    "Runner",
    "Workspace",
    "WorkspaceError",
    "WorkspaceLostError",
    "relative",
]

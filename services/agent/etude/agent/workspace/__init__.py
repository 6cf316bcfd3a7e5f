"""Workspace of tools: the files and the shell of one environment."""

from etude.agent.workspace.folder import FolderWorkspace
from etude.agent.workspace.interface import (
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
    relative_path,
)
from etude.agent.workspace.jobs import JobError, JobFault, Jobs, JobState, NoJobs
from etude.agent.workspace.memory import MemoryWorkspace
from etude.agent.workspace.notes import FolderNotes, MemoryNotes, Notes

__all__ = [
    "HOME",
    "MAX_FILE_BYTES",
    "ExecResult",
    "FileInfo",
    "FileKind",
    "FolderNotes",
    "FolderWorkspace",
    "JobError",
    "JobFault",
    "JobState",
    "Jobs",
    "MemoryNotes",
    "MemoryWorkspace",
    "NoJobs",
    "Notes",
    "PathFault",
    "Runner",
    "Workspace",
    "WorkspaceError",
    "WorkspaceLostError",
    "relative_path",
]

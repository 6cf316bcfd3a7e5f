"""The change of a leased workspace since its first files, within limits."""

from etude.common.errors import WrongStateError
from etude.envserver import metrics
from etude.envserver.drivers.base import Sandbox
from etude.envserver.host.workspace_sources import WorkspaceSource
from etude.envserver.storage import folders, trees
from etude.envserver.storage.folders import FolderLimits, TooLargeError
from etude.v1 import environments_pb2


class ChangeTooLargeError(WrongStateError):
    """The policy changed more than it may hand in: its own fault, never the platform's."""

    reason = "ChangeTooLarge"


async def read_change(
    sandbox: Sandbox, source: WorkspaceSource, limits: FolderLimits
) -> environments_pb2.WorkspaceDiff:
    """Read the change of a workspace that began with these files.

    Raises:
        ChangeTooLargeError: it exceeds the limits.
    """
    try:
        if source.base is not None:
            return await sandbox.read_change(source.base, limits)
        found = await sandbox.read_files(folders.DIFF)
        change = trees.tree_difference(source.tree, found.tree)
        _check(change, limits)
    except TooLargeError as error:
        metrics.large_changes.inc()
        raise ChangeTooLargeError(str(error)) from error
    return change


def _check(change: environments_pb2.WorkspaceDiff, limits: FolderLimits) -> None:
    """Check a change against the limits.

    Raises:
        TooLargeError: it exceeds them.
    """
    num_files = len(change.written) + len(change.deleted)
    num_bytes = sum(len(file.content) for file in change.written)
    if num_files > limits.max_files or num_bytes > limits.max_bytes:
        raise TooLargeError(
            f"the change has {num_files} files and {num_bytes} bytes, more than"
            f" {limits.max_files} files or {limits.max_bytes} bytes"
        )

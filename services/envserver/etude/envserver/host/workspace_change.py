"""The change of a leased workspace since its first files or its task's set-up, within limits."""

from collections.abc import Mapping

from blake3 import blake3

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
    sandbox: Sandbox,
    source: WorkspaceSource,
    limits: FolderLimits,
    setup_files: Mapping[str, str],
) -> environments_pb2.WorkspaceDiff:
    """Read the change of a workspace that began with these files.

    Args:
        sandbox: of the workspace.
        source: its first files.
        limits: on the change.
        setup_files: of the task's set-up, which are no part of the change.

    Raises:
        ChangeTooLargeError: it exceeds the limits.
    """
    try:
        if source.base is not None:
            change = await sandbox.read_change(source.base, limits)
            return without_setup(change, setup_files)
        found = await sandbox.read_files(folders.DIFF)
        change = without_setup(trees.tree_difference(source.tree, found.tree), setup_files)
        _check(change, limits)
    except TooLargeError as error:
        metrics.large_changes.inc()
        raise ChangeTooLargeError(str(error)) from error
    return change


def list_setup_files(change: environments_pb2.WorkspaceDiff) -> dict[str, str]:
    """Files of a set-up by path: digests of those that it wrote, nothing for what it deleted."""
    return {file.path: _digest(file) for file in change.written} | dict.fromkeys(change.deleted, "")


def without_setup(
    change: environments_pb2.WorkspaceDiff, setup_files: Mapping[str, str]
) -> environments_pb2.WorkspaceDiff:
    """A change since the first files as one since the set-up."""
    if not setup_files:
        return change
    left = environments_pb2.WorkspaceDiff()
    left.CopyFrom(change)
    del left.written[:], left.deleted[:]
    left.written.extend(
        file for file in change.written if setup_files.get(file.path) != _digest(file)
    )
    present = {file.path for file in change.written}
    deleted = {path for path in change.deleted if setup_files.get(path) != ""}
    gone = {path for path, digest in setup_files.items() if digest and path not in present}
    left.deleted.extend(sorted(deleted | gone))
    return left


def _digest(file: environments_pb2.WorkspaceFile) -> str:
    return blake3(b"%d" % file.executable + file.content).hexdigest(length=16)


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

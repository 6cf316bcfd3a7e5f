"""Files of a user's folder as values: read, and packed for an environment."""

import io
import os
import subprocess
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from etude.agent.interactive.commands import CommandRunner
from etude.agent.workspace import FolderWorkspace, PathFault, WorkspaceError
from etude.common.errors import Problem, UserError

MAX_FILES = 10_000
MAX_BYTES = 32 << 20
"""Of one folder: half of what a host hands back, so that the policy has room."""
_GIT_S = 300.0
_PATH = os.environ.get("PATH", os.defpath)


class UserFile(NamedTuple):
    """One regular file."""

    content: bytes
    is_executable: bool = False


class FolderFiles(NamedTuple):
    """Files of a folder."""

    files: Mapping[str, UserFile]
    """By path."""
    num_left_out: int
    """Links, and files that are too large or have no name in UTF-8."""


def open_folder(folder: Path) -> FolderWorkspace:
    """Open a user's folder, without a question to the user; links are not followed."""
    return FolderWorkspace(folder, CommandRunner(folder, {}).run)


async def read_folder(folder: Path) -> FolderFiles:
    """Read the files of a folder; in a work tree of git, those that git does not ignore.

    Raises:
        UserError: there are too many, or no git.
    """
    workspace = open_folder(folder)
    files: dict[str, UserFile] = {}
    num_left_out = num_bytes = 0
    for path in _list_paths(folder, workspace):
        try:
            file = await read_file(workspace, path)
        except WorkspaceError:
            num_left_out += 1
            continue
        if file is None:  # git lists it until its removal is committed
            continue
        files[path] = file
        num_bytes += len(file.content)
        if len(files) > MAX_FILES or num_bytes > MAX_BYTES:
            what = f"holds more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB"
            fix = "name a folder below it, or list in .gitignore what the work does not need"
            raise UserError(Problem("InvalidArgument", what, str(folder), fix))
    return FolderFiles(files, num_left_out)


async def read_file(workspace: FolderWorkspace, path: str) -> UserFile | None:
    """Read one file; None if there is none.

    Raises:
        WorkspaceError: it is not a regular file, or too large.
    """
    try:
        content = await workspace.read(path)
        mode = (workspace.root / path).lstat().st_mode
    except FileNotFoundError:
        return None
    except WorkspaceError as error:
        if error.fault is PathFault.NO_SUCH_FILE:
            return None
        raise
    return UserFile(content, bool(mode & 0o100))


def _list_paths(folder: Path, workspace: FolderWorkspace) -> Iterable[str]:
    if run_git(folder, ("rev-parse", "--is-inside-work-tree")).stdout.strip() != b"true":
        paths = (found.path for found in workspace.files("", hidden=True))
        return [path for path in paths if ".git" not in path.split("/")]
    words = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = run_git(folder, words).stdout.decode("utf-8", "surrogateescape").split("\0")
    return sorted(set(names) - {""})


def find_ignored(folder: Path, paths: Iterable[str]) -> set[str]:
    """Find the paths that git ignores in a folder; none outside of a work tree.

    Raises:
        UserError: there is no git.
    """
    names = "\0".join(paths).encode()
    done = run_git(folder, ("check-ignore", "-z", "--stdin"), names=names)
    return set(done.stdout.decode().split("\0"))


def run_git(
    folder: Path,
    words: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    names: bytes = b"",
) -> "subprocess.CompletedProcess[bytes]":
    """Run git in a folder to its end, whatever its exit code.

    Args:
        folder: where.
        words: arguments.
        environment: in place of this process's; PATH is added.
        names: for its input.

    Raises:
        UserError: there is no git, or it does not end.
    """
    try:
        return subprocess.run(
            ["git", *words],  # noqa: S607 - the user's own
            cwd=folder,
            env=None if environment is None else {"PATH": _PATH, **environment},
            input=names,
            capture_output=True,
            check=False,
            timeout=_GIT_S,
        )
    except FileNotFoundError as error:
        fix = "install git: the changes come back as a patch of it"
        raise UserError(Problem("NotInstalled", "there is no git", "PATH", fix)) from error
    except subprocess.TimeoutExpired as error:
        what = f"git {words[0]} did not end within {_GIT_S:g} s"
        raise UserError(Problem("TimedOut", what, str(folder), "try again")) from error


def pack_files(files: Mapping[str, UserFile]) -> bytes:
    """Pack files as a tar archive, for any tar that unpacks it: of GNU, BusyBox or BSD."""
    buffer = io.BytesIO()
    now_s = int(time.time())
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path, file in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mtime = len(file.content), now_s
            entry.mode = 0o755 if file.is_executable else 0o644
            archive.addfile(entry, io.BytesIO(file.content))
    return buffer.getvalue()

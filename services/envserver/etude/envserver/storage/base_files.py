"""Files that a workspace begins with, listed: the base that its changes are compared with.

A list says of each file its size, time and digest, so that a comparison reads the files that were
written since, and no others.
"""

import contextlib
import hashlib
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from etude.agent.workspace.interface import MAX_DEPTH
from etude.envserver.storage.ignore_rules import IGNORE_FILE, MAX_BYTES, IgnoreRules
from etude.envserver.storage.trees import Tree
from etude.v1 import guest_pb2

REPOSITORY = ".git"
"""Never part of a change, whatever it is in."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NS = 1_000_000_000
_READ_BYTES = 1 << 20


class BaseFile(NamedTuple):
    """One file as it was at first."""

    size: int
    mtime_ns: int
    """A file with this time and size is unchanged; 0: its content decides."""
    executable: bool
    sha256: bytes


BaseFiles = Mapping[str, BaseFile]
"""Files by path."""


def encode_base(files: BaseFiles) -> bytes:
    """Encode a list in the order in which a guest walks over its folders."""
    base = guest_pb2.GuestBase()
    for path in sorted(files, key=_walk_order):
        file = files[path]
        base.files.add(
            path=path,
            size=file.size,
            mtime_ns=file.mtime_ns,
            executable=file.executable,
            sha256=file.sha256,
        )
    return base.SerializeToString()


def decode_base(data: bytes) -> dict[str, BaseFile]:
    """Decode a list.

    Raises:
        DecodeError: it is damaged.
    """
    found = guest_pb2.GuestBase.FromString(data).files
    return {
        each.path: BaseFile(each.size, each.mtime_ns, each.executable, each.sha256)
        for each in found
    }


def list_tree(tree: Tree) -> dict[str, BaseFile]:
    """List files at hand; their time is not known, as they are yet to be written."""
    return {
        path: BaseFile(len(file.content), 0, file.executable, hashlib.sha256(file.content).digest())
        for path, file in tree.items()
    }


def _walk_order(path: str) -> list[bytes]:
    return path.encode().split(b"/")


def list_folder(
    folder: Path, *, tracked: Collection[str] = (), keeps_ns: bool = True
) -> dict[str, BaseFile]:
    """List the regular files of a folder that its .gitignore files do not ignore.

    Args:
        folder: the root of a repository, which does not change meanwhile.
        tracked: paths that are listed even if they are ignored.
        keeps_ns: False if the files' times will be cut to whole seconds.
    """
    lister = _Lister(frozenset(tracked), 1 if keeps_ns else _NS)
    root = os.open(folder, _FOLDER)
    try:
        lister.list(root, b"", IgnoreRules())
    finally:
        os.close(root)
    return lister.found


@dataclass(slots=True)
class _Lister:
    tracked: frozenset[str]
    unit_ns: int
    found: dict[str, BaseFile] = field(default_factory=dict)
    _tracked_folders: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self._tracked_folders = frozenset(_parents(self.tracked))

    def list(self, folder: int, prefix: bytes, above: IgnoreRules) -> None:
        rules = read_rules(folder, prefix, above)
        with os.scandir(folder) as entries:
            names = sorted((os.fsencode(each.name), each) for each in entries)
        for name, entry in names:
            path = prefix + name
            if entry.is_dir(follow_symlinks=False):
                self._folder(folder, name, path, rules)
            elif entry.is_file(follow_symlinks=False):
                self._file(folder, name, path, rules)

    def _folder(self, parent: int, name: bytes, path: bytes, rules: IgnoreRules) -> None:
        text = _text(path)
        is_ignored = name == REPOSITORY.encode() or rules.ignores(path, is_folder=True)
        has_tracked = text in self._tracked_folders
        if text is None or path.count(b"/") >= MAX_DEPTH or (is_ignored and not has_tracked):
            return
        inner = os.open(name, _FOLDER, dir_fd=parent)
        try:
            # In an ignored folder everything is ignored, but what is tracked.
            self.list(inner, path + b"/", _EVERYTHING if is_ignored else rules)
        finally:
            os.close(inner)

    def _file(self, parent: int, name: bytes, path: bytes, rules: IgnoreRules) -> None:
        text = _text(path)
        if text is None or (text not in self.tracked and _is_ignored(name, path, rules)):
            return
        descriptor = os.open(name, _READ, dir_fd=parent)
        try:
            status = os.fstat(descriptor)
            digest = _digest(descriptor)
        finally:
            os.close(descriptor)
        mtime_ns = status.st_mtime_ns // self.unit_ns * self.unit_ns
        is_executable = bool(status.st_mode & stat.S_IXUSR)
        self.found[text] = BaseFile(status.st_size, mtime_ns, is_executable, digest)


_EVERYTHING = IgnoreRules().inside(b"", b"*\n")


def read_rules(folder: int, prefix: bytes, above: IgnoreRules) -> IgnoreRules:
    """The rules of an open folder on top of those above it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(IGNORE_FILE, _READ, dir_fd=folder)
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return above.inside(prefix, os.read(descriptor, MAX_BYTES))
        finally:
            os.close(descriptor)
    return above


def _is_ignored(name: bytes, path: bytes, rules: IgnoreRules) -> bool:
    return name == REPOSITORY.encode() or rules.ignores(path, is_folder=False)


def _text(path: bytes) -> str | None:
    """The path as text; None for one that is not UTF-8."""
    try:
        return path.decode()
    except UnicodeDecodeError:
        return None


def _parents(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        parent = path.rpartition("/")[0]
        while parent:
            yield parent
            parent = parent.rpartition("/")[0]


def _digest(descriptor: int) -> bytes:
    hasher = hashlib.sha256()
    while piece := os.read(descriptor, _READ_BYTES):
        hasher.update(piece)
    return hasher.digest()

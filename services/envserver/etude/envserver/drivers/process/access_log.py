"""Log of the files that one command touches, by inotify, and of the programs that it runs.

Covered: files of the workspace, of /tmp and of /logs, in up to `MAX_FOLDERS` folders: written and
deleted ones, and those opened for reading whose paths matter to tests, history and caches. Not
covered: files of the machine (their watches would show other tenants' accesses), files of folders
that were made and filled within one look, programs that end between two looks. What may be missing
makes the log incomplete.
"""

import contextlib
import ctypes
import json
import os
import re
import struct
from dataclasses import dataclass, field

from etude.envserver.isolation.sandbox_layout import LOGS, WORKSPACE

MAX_FOLDERS = 256
MAX_ACCESSES = 256
MAX_ENCODED_BYTES = 32 << 10
"""Of all paths as JSON, where a character may take twelve bytes: reports are one packet."""
_ROOTS = (WORKSPACE, "/tmp", LOGS)  # noqa: S108 - the sandbox's
_MAX_PATH_CHARS = 256
_READ_BYTES = 1 << 16
_HEADER = struct.Struct("iIII")
_OPEN, _CLOSE_WRITE, _MODIFY, _CREATE = 0x20, 0x8, 0x2, 0x100
_MOVED_FROM, _MOVED_TO, _DELETE = 0x40, 0x80, 0x200
_WRITTEN = _CLOSE_WRITE | _MODIFY | _MOVED_TO | _CREATE
_DELETED = _MOVED_FROM | _DELETE
_IS_FOLDER, _OVERFLOW = 0x4000_0000, 0x4000
_ONLY_FOLDERS, _NO_LINKS = 0x0100_0000, 0x0200_0000
_MASK = _OPEN | _WRITTEN | _DELETED | _ONLY_FOLDERS | _NO_LINKS
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_UNWATCHED = re.compile(r"/node_modules(?:/|$)|/\.git/objects/..$")
READ_PATHS = re.compile(
    r"/\.git/(?:logs/|ORIG_HEAD|FETCH_HEAD|packed-refs|refs/(?:remotes|tags|stash)|objects/pack)"
    r"|/__pycache__/|\.py[co]$|/\.\w+_cache/|/htmlcov/|/\.coverage|/\.cache/"
    r"|/(?:test_[^/]*|[^/]*_test\.\w+|conftest\.py)$|/tests?/"
    r"|/\.\w+_history$|\.sw[opn]$|/(?:site|dist)-packages/|/build/lib/"
)
"""Paths of which reading is told."""

_libc = ctypes.PyDLL(None, use_errno=True)


@dataclass(slots=True)
class AccessLog:
    """Watches of one command's folders, and what they showed."""

    is_complete: bool = True
    _accesses: dict[tuple[str, str], None] = field(default_factory=dict)
    _folders: dict[int, str] = field(default_factory=dict)
    _descriptor: int = -1
    _encoded_bytes: int = 0

    def open(self) -> None:
        """Watch the folders that are there; without inotify the log stays empty and incomplete."""
        self._descriptor = _libc.inotify_init1(_NONBLOCK_CLOEXEC)
        if self._descriptor < 0:
            self.is_complete = False
            return
        for root in _ROOTS:
            self._watch(root)

    def read(self) -> None:
        """Take the accesses since the last look.

        The watches end with this process: to close them takes the kernel milliseconds, for which
        no report has to wait.
        """
        if self._descriptor < 0:
            return
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._descriptor, _READ_BYTES):
                self._take(data)

    def add_program(self, name: str) -> None:
        """Record a program that runs."""
        self._add("started", name)

    def result(self) -> list[tuple[str, str]]:
        """Kind and path of each access, in the order of their first time."""
        return list(self._accesses)

    def _take(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            watch, mask, _, length = _HEADER.unpack_from(data, at)
            at += _HEADER.size
            name = data[at : at + length].rstrip(b"\0").decode("utf-8", "replace")
            at += length
            if mask & _OVERFLOW:
                self.is_complete = False
            elif watch in self._folders and name:
                self._see(f"{self._folders[watch]}/{name}", mask)

    def _see(self, path: str, mask: int) -> None:
        if mask & _IS_FOLDER:
            if mask & (_CREATE | _MOVED_TO):
                self._watch(path, is_new=True)
        elif mask & _WRITTEN:
            self._add("written", path)
        elif mask & _DELETED:
            self._add("deleted", path)
        elif READ_PATHS.search(path):
            self._add("read", path)

    def _watch(self, root: str, *, is_new: bool = False) -> None:
        """Watch a folder and those below it; the files of a new one were written."""
        for folder, folders, names in os.walk(root):
            if len(self._folders) >= MAX_FOLDERS:
                self.is_complete = False
                return
            folders[:] = [n for n in folders if not _UNWATCHED.search(f"{folder}/{n}")]
            watch = _libc.inotify_add_watch(self._descriptor, os.fsencode(folder), _MASK)
            if watch < 0:
                self.is_complete = False
                continue
            self._folders[watch] = os.fsencode(folder).decode("utf-8", "replace")
            for name in names if is_new else ():
                self._add("written", os.fsencode(f"{folder}/{name}").decode("utf-8", "replace"))

    def _add(self, kind: str, path: str) -> None:
        access = (kind, path[:_MAX_PATH_CHARS])
        if access in self._accesses:
            return
        self._encoded_bytes += len(json.dumps(access))
        if len(self._accesses) >= MAX_ACCESSES or self._encoded_bytes > MAX_ENCODED_BYTES:
            self.is_complete = False
            return
        self._accesses[access] = None

"""Git mirror or bundle on disk: commits, read without its configuration, hooks or work tree."""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from etude.common.harbor.task import MAX_FILE_BYTES, MAX_FILES, MAX_FOLDER_BYTES
from etude.envserver.storage.trees import File
from etude.envserver.tasks.formats.imported_task import ImportRefusedError

_LIMIT_S = 600.0
_REGULAR, _EXECUTABLE, _LINK = "100644", "100755", "120000"
_SAFE = ("core.hooksPath=/dev/null", "core.fsmonitor=false", "core.attributesFile=/dev/null")


class Checkout(NamedTuple):
    """The files of a commit."""

    files: dict[str, File]
    left_out: tuple[str, ...]
    """Links to what is no file of the commit, and submodules."""


class PatchChanges(NamedTuple):
    """Files that a patch writes and deletes."""

    written: dict[str, File]
    deleted: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GitMirror:
    """The objects of one repository, seen from an empty scratch repository."""

    source: Path
    scratch: Path
    """Scratch repository, whose configuration is the only one that git reads."""
    objects: Path
    """Where the mirror keeps its objects."""

    def unbundle(self) -> None:
        """Take the objects of a bundle over.

        Raises:
            ImportRefusedError: it is none, or lacks what it builds on.
        """
        self._run("bundle", "unbundle", str(self.source.resolve()))

    def check_commit(self, commit: str) -> None:
        """Check that there is a commit of this full name.

        Raises:
            ImportRefusedError: there is none.
        """
        if len(commit) not in {40, 64} or not set(commit) <= set("0123456789abcdef"):
            raise self._refuse(f"{commit[:80]!r} is no full name of a commit")
        try:
            kind = self._run("cat-file", "-t", commit).strip()
        except ImportRefusedError as cause:
            raise self._refuse(f"there is no commit {commit}") from cause
        if kind != b"commit":
            raise self._refuse(f"{commit} is a {kind.decode()}, no commit")

    def checkout(self, commit: str) -> Checkout:
        """The files of a commit, byte for byte as they are stored.

        Raises:
            ImportRefusedError: there is no such commit, or it holds what no workspace may.
        """
        self.check_commit(commit)
        listed = self._run("ls-tree", "-r", "-z", "--full-tree", commit)
        entries = [_entry(line) for line in listed.split(b"\0") if line]
        if len(entries) > MAX_FILES:
            raise self._refuse(f"{commit} holds more than {MAX_FILES} files")
        for entry in entries:
            self._check_path(entry.path)
        stored = [entry for entry in entries if entry.mode in {_REGULAR, _EXECUTABLE, _LINK}]
        contents = dict(zip((e.path for e in stored), self._contents(stored), strict=True))
        files = {
            e.path: File(contents[e.path], e.mode == _EXECUTABLE) for e in stored if e.mode != _LINK
        }
        left_out = [entry.path for entry in entries if entry not in stored]
        for entry in stored:
            if entry.mode == _LINK:
                target = _target(entry.path, contents[entry.path])
                if target in files:
                    files[entry.path] = files[target]
                else:
                    left_out.append(entry.path)
        return Checkout(dict(sorted(files.items())), tuple(left_out))

    def changes(self, commit: str, patch: str, what: str) -> PatchChanges:
        """Apply a patch to a commit.

        Args:
            commit: it is applied to.
            patch: in git's format.
            what: the patch is called in errors.

        Raises:
            ImportRefusedError: it does not apply.
        """
        if not patch.strip():
            return PatchChanges({}, ())
        self._run("read-tree", commit)
        text = patch if patch.endswith("\n") else patch + "\n"
        try:
            self._run("apply", "--cached", "--whitespace=nowarn", "-", data=text.encode())
        except ImportRefusedError as cause:
            reason = cause.problem.what
            raise ImportRefusedError(what, f"does not apply to {commit}: {reason}") from cause
        listed = self._run("diff-index", "--cached", "--raw", "--no-renames", "-z", commit)
        parts = listed.decode("utf-8", "surrogateescape").split("\0")
        entries, deleted = list[_Entry](), list[str]()
        for head, path in zip(parts[0:-1:2], parts[1::2], strict=True):
            self._check_path(path)
            _, mode, _, name, status = head.split()
            if status == "D":
                deleted.append(path)
            elif mode in {_REGULAR, _EXECUTABLE}:
                entries.append(_Entry(mode, name, path))
            else:
                raise ImportRefusedError(what, f"makes {path!r}, which is no regular file")
        contents = self._contents(entries)
        written = {
            entry.path: File(data, entry.mode == _EXECUTABLE)
            for entry, data in zip(entries, contents, strict=True)
        }
        return PatchChanges(written, tuple(deleted))

    def _check_path(self, path: str) -> None:
        parts = path.split("/")
        if {"", ".", ".."} & {*parts} or ".git" in {part.lower() for part in parts}:
            raise self._refuse(f"holds {path!r}, which is no path of a workspace")
        if not path.isprintable():
            raise self._refuse(f"holds {path!r}, with control characters or no UTF-8")

    def _contents(self, entries: Sequence["_Entry"]) -> list[bytes]:
        names = "".join(f"{entry.name}\n" for entry in entries).encode()
        command = self._command("cat-file", "--batch", "--buffer")
        # All names first: git answers while it reads, and 10,000 names are more than a pipe holds.
        names_file = self.scratch / "names"
        names_file.write_bytes(names)
        with (
            names_file.open("rb") as stdin,
            subprocess.Popen(
                command, env=_ENVIRONMENT, stdin=stdin, stdout=subprocess.PIPE
            ) as process,
        ):
            out = process.stdout
            if out is None:
                return []
            try:
                return list(self._read(out, entries))
            finally:
                process.kill()

    def _read(self, out: IO[bytes], entries: Sequence["_Entry"]) -> Iterator[bytes]:
        total = 0
        for entry in entries:
            header = out.readline().split()
            if len(header) != 3 or header[1] != b"blob":
                raise self._refuse(f"lacks the content of {entry.path!r}")
            size = int(header[2])
            total += size
            if size > MAX_FILE_BYTES:
                raise self._refuse(f"{entry.path!r} has {size} bytes, more than {MAX_FILE_BYTES}")
            if total > MAX_FOLDER_BYTES:
                raise self._refuse(f"holds more than {MAX_FOLDER_BYTES} bytes")
            yield out.read(size + 1)[:-1]

    def _run(self, *words: str, data: bytes = b"") -> bytes:
        try:
            done = subprocess.run(
                self._command(*words),
                env=_ENVIRONMENT,
                input=data,
                capture_output=True,
                check=False,
                timeout=_LIMIT_S,
            )
        except subprocess.TimeoutExpired as cause:
            raise self._refuse(f"git {words[0]} did not end within {_LIMIT_S:g} s") from cause
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise self._refuse(said[0][:200] if said else f"git {words[0]} failed")
        return done.stdout

    def _command(self, *words: str) -> list[str]:
        settings = [word for each in _SAFE for word in ("-c", each)]
        return ["git", f"--git-dir={self.scratch}", *settings, *words]

    def _refuse(self, what: str) -> ImportRefusedError:
        return ImportRefusedError(
            str(self.source), what, "fetch the mirror again, or leave the row out"
        )


class _Entry(NamedTuple):
    mode: str
    name: str
    path: str


_ENVIRONMENT: Mapping[str, str] = {
    "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
    "HOME": "/nonexistent",
    "LC_ALL": "C",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_TERMINAL_PROMPT": "0",
}


def open_mirror(source: Path, scratch: Path) -> GitMirror:
    """Open a mirror: a folder with a repository, bare or not, or a bundle.

    Args:
        source: the folder or the bundle.
        scratch: an empty folder.

    Raises:
        ImportRefusedError: it is neither.
    """
    subprocess.run(
        ["git", "init", "-q", "--bare", "--template=", str(scratch)],  # noqa: S607 - the user's git
        env=_ENVIRONMENT,
        check=True,
        capture_output=True,
    )
    if source.is_file():
        mirror = GitMirror(source=source, scratch=scratch, objects=scratch / "objects")
        mirror.unbundle()
        return mirror
    for objects in (source / "objects", source / ".git" / "objects"):
        if objects.is_dir():
            info = scratch / "objects" / "info"
            info.mkdir(exist_ok=True)
            (info / "alternates").write_text(f"{objects.resolve()}\n")
            return GitMirror(source=source, scratch=scratch, objects=objects)
    raise ImportRefusedError(
        str(source), "is neither a repository nor a bundle", "git clone --mirror"
    )


def _entry(line: bytes) -> _Entry:
    head, _, path = line.partition(b"\t")
    mode, _, name = head.decode().split()
    return _Entry(mode, name, path.decode("utf-8", "surrogateescape"))


def _target(path: str, link: bytes) -> str:
    """Target of a link as a path of the commit; empty if it leaves the commit."""
    found = list(PurePosixPath(path).parts[:-1])
    for part in link.decode("utf-8", "surrogateescape").split("/"):
        if part == "..":
            if not found:
                return ""
            found.pop()
        elif part not in {"", "."}:
            found.append(part)
    return "" if link.startswith(b"/") else "/".join(found)

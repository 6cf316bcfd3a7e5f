"""Files of a workspace as a value: compared, patched, identified."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from blake3 import blake3

from etude.agent import patterns
from etude.agent.workspace import WorkspaceError, relative_path
from etude.common.errors import InvalidFieldError
from etude.v1 import environments_pb2


class File(NamedTuple):
    """One regular file."""

    content: bytes
    executable: bool = False


Tree = Mapping[str, File]
"""Files by relative path with forward slashes."""


def tree_identity(tree: Tree) -> str:
    """Digest of a tree: independent of order, owner and age of its files."""
    hasher = blake3()
    for path in sorted(tree):
        content, executable = tree[path]
        hasher.update(
            f"{path}\0{len(content)}\0{executable:d}\0".encode("utf-8", "surrogateescape")
        )
        hasher.update(content)
    return hasher.hexdigest()


def tree_difference(before: Tree, after: Tree) -> environments_pb2.WorkspaceDiff:
    """Changes that turn one tree into the other."""
    written = [path for path in sorted(after) if after[path] != before.get(path)]
    return environments_pb2.WorkspaceDiff(
        written=[
            environments_pb2.WorkspaceFile(
                path=path, content=after[path].content, executable=after[path].executable
            )
            for path in written
        ],
        deleted=sorted(before.keys() - after.keys()),
    )


def apply_diff(
    tree: Tree, diff: environments_pb2.WorkspaceDiff, artefacts: Iterable[str]
) -> dict[str, File]:
    """Apply the changes whose paths match a pattern; no pattern allows all.

    Raises:
        InvalidFieldError: a path or a pattern is invalid.
    """
    allowed = _allowed([*(file.path for file in diff.written), *diff.deleted], artefacts)
    result = {path: file for path, file in tree.items() if path not in {*diff.deleted} & allowed}
    written = files_of(diff.written, "diff.written")
    result.update({path: file for path, file in written.items() if path in allowed})
    check_layout(result, "diff.written")
    return result


def allowed_deletions(diff: environments_pb2.WorkspaceDiff, artefacts: Iterable[str]) -> list[str]:
    """Deleted paths that match a pattern; no pattern allows all.

    Raises:
        InvalidFieldError: a path or a pattern is invalid.
    """
    for path in diff.deleted:
        _check_path(path, "diff.deleted")
    return sorted(_allowed(list(diff.deleted), artefacts))


def files_of(messages: Iterable[environments_pb2.WorkspaceFile], field: str) -> dict[str, File]:
    """Files of a message by path.

    Raises:
        InvalidFieldError: a path leaves its folder.
    """
    found = {}
    for message in messages:
        _check_path(message.path, field)
        found[message.path] = File(message.content, message.executable)
    return found


def check_layout(tree: Tree, field: str) -> None:
    """Check that no path is both a file and a folder.

    Raises:
        InvalidFieldError: one is both.
    """
    for path in tree:
        parent = path.rpartition("/")[0]
        while parent:
            if parent in tree:
                raise InvalidFieldError(
                    field, f"{parent!r} is a file and also a folder of {path!r}"
                )
            parent = parent.rpartition("/")[0]


def _check_path(path: str, field: str) -> None:
    try:
        is_clean = bool(path) and relative_path(path) == path
    except WorkspaceError:
        is_clean = False
    if not is_clean:
        raise InvalidFieldError(field, f"{path[:200]!r} is not a path inside the workspace")


def _allowed(paths: list[str], artefacts: Iterable[str]) -> set[str]:
    globs = list(artefacts)
    try:
        matchers = [patterns.glob_matcher(glob) for glob in globs]
    except patterns.PatternError as error:
        raise InvalidFieldError("artefacts", str(error)) from error
    return {p for p in paths if not globs or any(m.fullmatch(p.encode()) for m in matchers)}

"""Cleanup of unfinished uploads in a folder store; a bucket deletes its own by a rule."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlparse

_STAGED = re.compile(r"#[0-9]+$")
"""How the names of files end that the client writes before it gives them their key: no listing
shows them, and the client refuses a key with such a name."""


def delete_unfinished_uploads(url: str, *, older_than_s: float) -> list[Path]:
    """Delete the files of interrupted writes in a folder store; in buckets delete nothing.

    Args:
        url: of the store.
        older_than_s: since the last write to it, counted by the folder's own clock up to its
            newest file.

    Returns:
        The files that are gone.

    Raises:
        OSError: a file could not be deleted.
    """
    parts = urlparse(url)
    if parts.scheme != "file":
        return []
    written = dict(_files(unquote(parts.path)))
    newest_s = max(written.values(), default=0.0)
    found = [
        path
        for path, modified_s in written.items()
        if _STAGED.search(path.name) and modified_s + older_than_s <= newest_s
    ]
    for path in found:
        path.unlink(missing_ok=True)
    return found


def _files(folder: str) -> Iterator[tuple[Path, float]]:
    """Every file with the time of its last write."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            with contextlib.suppress(FileNotFoundError):  # finished or deleted meanwhile
                yield path, path.lstat().st_mtime

"""File contents and their digests, and the id of the hashed embedder. Loads no numpy."""

import hashlib
from typing import NamedTuple

HASHED_ID = "hashed-1"
"""Id of the embedder that needs no model."""


class FileContent(NamedTuple):
    """A file's content when it was read."""

    digest: bytes
    data: bytes
    """Empty if the file is too large to be searched."""


def content_digest(data: bytes) -> bytes:
    """Identity of a file's content."""
    return hashlib.sha256(data).digest()

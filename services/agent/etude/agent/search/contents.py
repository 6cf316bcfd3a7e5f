"""What a file held when it was read, and how contents and vectors are named. Loads no numpy."""

import hashlib
from typing import NamedTuple

HASHED = "hashed-1"
"""The vectors that are always there."""


class Content(NamedTuple):
    """A file as it was when it was read."""

    digest: bytes
    data: bytes
    """Empty where the file is too large to be searched."""


def digest(data: bytes) -> bytes:
    """Identity of a file's content."""
    return hashlib.sha256(data).digest()

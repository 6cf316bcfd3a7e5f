"""Description of a pool: its resolved spec as text, and the revision that names that text."""

import json
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from etude.common.errors import Problem, UserError
from etude.common.role_inputs import ResolvedPool

MAX_BYTES = 1 << 20
"""A ConfigMap holds no more."""


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """A pool, as the operator wrote it."""

    pool: ResolvedPool
    text: str
    """Canonical JSON, with the fields that this release does not know."""

    @property
    def revision(self) -> str:
        """Digest of the text."""
        return revision_of(self.text)


def revision_of(text: str) -> str:
    """The revision of a description in canonical JSON."""
    return blake3(text.encode()).hexdigest(length=16)


def parse_description(text: str | bytes, where: str) -> PoolDescription:
    """Parse the description of a pool.

    Args:
        text: JSON of a ResolvedPool.
        where: it comes from.

    Raises:
        UserError: it is no valid pool.
    """
    fix = "apply a manifest that passes `etude lint`"
    if len(text) > MAX_BYTES:
        raise UserError(Problem("InvalidSpec", f"has more than {MAX_BYTES} bytes", where, fix))
    try:
        data = json.loads(text)
        pool = ResolvedPool.parse_known_fields(data)
    except ValueError as cause:
        what = f"cannot be read as ResolvedPool: {cause}"
        raise UserError(Problem("InvalidSpec", what, where, fix)) from cause
    return PoolDescription(pool, json.dumps(data, separators=(",", ":"), sort_keys=True))


def read_description(path: Path) -> PoolDescription:
    """Read the description in a mounted file.

    Raises:
        UserError: the file is missing or is no valid pool.
    """
    try:
        text = path.read_bytes()
    except OSError as cause:
        fix = "mount the pool's ConfigMap there"
        raise UserError(
            Problem("InvalidSpec", f"cannot be read: {cause}", str(path), fix)
        ) from cause
    return parse_description(text, str(path))

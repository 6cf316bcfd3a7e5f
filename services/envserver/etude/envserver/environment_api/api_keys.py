"""API keys and their roles. Only digests are stored, and every comparison takes the same time.

A file has one key a line: its name, its role, and the SHA-256 of the key. Keys have 32 random
bytes, so their digests need no salt.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from etude.common.errors import ForbiddenError, Problem, UserError

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PREFIX = "etude_"
_MAX_KEY = 256


class KeyRole(StrEnum):
    """Permissions of a key."""

    FULL = "full"
    """Create, change, reset and end sandboxes."""
    TOOLS = "tools"
    """Tools of environments, as a policy in production has them; no reset, step or state."""


class ApiCaller(NamedTuple):
    """Owner of the key of a request."""

    name: str
    role: KeyRole


class _Entry(NamedTuple):
    caller: ApiCaller
    digest: bytes


class UnknownKeyError(ForbiddenError):
    """The request carries no known key."""

    reason = "Unauthenticated"


class BadKeysError(UserError):
    """The keys cannot be used as they are."""

    def __init__(self, what: str, where: str) -> None:
        fix = "make a key: etude-envserver key NAME full|tools"
        super().__init__(Problem("InvalidKeys", what, where, fix))


class ApiKeys(NamedTuple):
    """The keys of one environment API."""

    entries: Sequence[_Entry]

    def identify(self, key: str) -> ApiCaller:
        """Identify the owner of a key.

        Raises:
            UnknownKeyError: the key is unknown.
        """
        digest = hashlib.sha256(key[:_MAX_KEY].encode("utf-8", "replace")).digest()
        found = None
        for entry in self.entries:  # all of them, so that the time does not tell which one fits
            if hmac.compare_digest(entry.digest, digest):
                found = entry.caller
        if found is None:
            raise UnknownKeyError("the API key is missing or unknown")
        return found


def load_keys(path: Path) -> ApiKeys:
    """Read the keys of a file.

    Raises:
        BadKeysError: the file cannot be read, has no key, or has an invalid line.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadKeysError(str(error), str(path)) from error
    entries = [
        _entry(line.split(), f"{path}:{number}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.startswith("#")
    ]
    names = [entry.caller.name for entry in entries]
    if not names or len(set(names)) < len(names):
        raise BadKeysError("holds no key, or two of one name", str(path))
    return ApiKeys(entries)


def _entry(words: Sequence[str], where: str) -> _Entry:
    match words:
        case [name, "full" | "tools" as role, digest] if _NAME.fullmatch(
            name
        ) and _DIGEST.fullmatch(digest):
            return _Entry(ApiCaller(name, KeyRole(role)), bytes.fromhex(digest))
    raise BadKeysError("is not `name role digest`", where)


def make_key(name: str, role: KeyRole) -> tuple[str, str]:
    """Make a key, and its line in the key file.

    Raises:
        BadKeysError: the name cannot be used.
    """
    if not _NAME.fullmatch(name):
        raise BadKeysError("is not a valid name: use small letters, digits and dashes", name)
    key = _PREFIX + secrets.token_urlsafe(32)
    return key, f"{name} {role} {hashlib.sha256(key.encode()).hexdigest()}"

"""API keys of the gateway: owner, scopes, consent and quota of each. Only digests are stored.

A file has one key a line: its user, its scopes, the SHA-256 of the key, and options.

    alice serve,feedback 9f86d0…  tenant=acme consent=2026-11 limit=600

Keys have 32 random bytes, so their digests need no salt. The file is a Secret's, and is read again
when it changes: a key or a consent that is taken back there ends within seconds.
"""

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from etude.common.errors import EtudeError, FullError, Problem, UserError
from etude.common.token_bucket import TokenBucket

log = logging.getLogger(__name__)

RELOAD_S = 5.0
"""A changed file is noticed within so long."""
DEFAULT_LIMIT = 600
"""Requests a minute of a key without a limit of its own."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PREFIX = "etude_"
_MAX_KEY = 256
_OPTIONS = frozenset({"tenant", "consent", "limit"})


class Scope(StrEnum):
    """Permissions of a key."""

    SERVE = "serve"
    """Ask the policy."""
    FEEDBACK = "feedback"
    """Send events."""
    ADMIN = "admin"
    """Promote, roll back, freeze."""


class Caller(NamedTuple):
    """Owner of the key of a request."""

    user: str
    tenant: str
    scopes: frozenset[Scope]
    consent: str
    """Version of the terms under which turns are recorded; empty: none are."""
    limit: int
    """Requests a minute."""


class UnauthenticatedError(EtudeError):
    """The request carries no known key."""

    reason = "Unauthenticated"


class ScopeError(EtudeError):
    """The key does not allow this."""

    reason = "PermissionDenied"


@dataclass(slots=True)
class ApiKeyFile:
    """Keys of a file, which may change."""

    path: Path
    num_processes: int = 1
    """Processes that share the quotas."""
    _callers: Mapping[bytes, Caller] = field(default_factory=dict)
    _stamp: tuple[int, int] = (0, 0)
    """Time and size of the file that was read."""
    _checked_s: float = 0.0
    _buckets: dict[bytes, TokenBucket] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, *, num_processes: int = 1) -> "ApiKeyFile":
        """Read the file.

        Raises:
            UserError: it cannot be read, has no key, or has an invalid line.
        """
        file = cls(path, num_processes)
        file._read()
        return file

    def admit(self, key: str, scope: Scope) -> Caller:
        """Identify the owner of a key, and count a request.

        Raises:
            UnauthenticatedError: the key is missing or unknown.
            ScopeError: the key lacks the scope.
            FullError: the key's quota is spent for now.
        """
        self._read_again()
        digest = hashlib.sha256(key[:_MAX_KEY].encode("utf-8", "replace")).digest()
        caller = self._callers.get(digest)
        if caller is None:
            raise UnauthenticatedError("the API key is missing or unknown")
        if scope not in caller.scopes:
            raise ScopeError(f"the API key of {caller.user} lacks the scope {scope.value}")
        self._count(digest, caller)
        return caller

    def _count(self, digest: bytes, caller: Caller) -> None:
        now_s = time.monotonic()
        bucket = self._buckets.get(digest)
        if bucket is None:
            burst = max(1.0, caller.limit / self.num_processes)
            bucket = TokenBucket.full(burst / 60, burst, at_s=now_s)
        bucket = bucket.refill(now_s)
        if bucket.tokens < 1:
            what = f"more than {caller.limit} requests a minute"
            raise FullError(what, retry_after_s=bucket.wait_s())
        self._buckets[digest] = bucket.take()

    def _read_again(self) -> None:
        """Read the file if it has changed; one that cannot be read takes every consent back."""
        now_s = time.monotonic()
        if now_s - self._checked_s < RELOAD_S:
            return
        try:
            self._read()
        except UserError as error:
            log.error(  # noqa: TRY400 - the error is the user's
                "nothing is recorded until the keys can be read: %s", error
            )
            self._callers = {
                digest: caller._replace(consent="") for digest, caller in self._callers.items()
            }
            self._stamp = (0, 0)

    def _read(self) -> None:
        self._checked_s = time.monotonic()
        try:
            status = self.path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if stamp == self._stamp:
                return
            lines = self.path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise _bad_keys(str(error), str(self.path)) from error
        self._callers = _parse_lines(lines, self.path)
        self._stamp = stamp
        self._buckets.clear()


def _parse_lines(lines: Sequence[str], path: Path) -> Mapping[bytes, Caller]:
    callers: dict[bytes, Caller] = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            digest, caller = _parse_line(line.split(), f"{path}:{number}")
            callers[digest] = caller
    if not callers:
        raise _bad_keys("holds no key", str(path))
    return callers


def _parse_line(words: Sequence[str], where: str) -> tuple[bytes, Caller]:
    if len(words) < 3 or not _NAME.fullmatch(words[0]) or not _DIGEST.fullmatch(words[2]):
        raise _bad_keys("is not `user scopes digest`", where)
    options = {name: value for name, _, value in (word.partition("=") for word in words[3:])}
    if options.keys() - _OPTIONS or not all(map(_NAME.fullmatch, options.values())):
        raise _bad_keys(f"has options other than {', '.join(sorted(_OPTIONS))}", where)
    try:
        scopes = frozenset(map(Scope, words[1].split(",")))
    except ValueError:
        raise _bad_keys(f"has scopes other than {', '.join(Scope)}", where) from None
    limit = options.get("limit", str(DEFAULT_LIMIT))
    if not limit.isdecimal() or not 0 < int(limit) <= 1_000_000:
        raise _bad_keys("has a limit that is no number of requests a minute", where)
    caller = Caller(
        words[0], options.get("tenant", ""), scopes, options.get("consent", ""), int(limit)
    )
    return bytes.fromhex(words[2]), caller


def make_key(user: str, scopes: str) -> tuple[str, str]:
    """Make a key, and its line in the key file.

    Raises:
        UserError: the user or a scope cannot be used.
    """
    key = _PREFIX + secrets.token_urlsafe(32)
    words = [user, scopes, hashlib.sha256(key.encode()).hexdigest()]
    _parse_line(words, user)
    return key, " ".join(words)


def _bad_keys(what: str, where: str) -> UserError:
    fix = "make a key: etude-gateway key USER serve,feedback"
    return UserError(Problem("InvalidKeys", what, where, fix))

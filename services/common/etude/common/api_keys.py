"""API keys of gateway and feedback: owner, scopes, consent and rate of each. Only digests are kept.

A file has one key a line: its user, its scopes, the SHA-256 of the key, and options.

    alice serve,feedback 9f86d0…  tenant=acme consent=2026-11 limit=600

Keys have 32 random bytes, so their digests need no salt. The file is a Secret's, and is read again
when it changes: a key or a consent that is taken back there ends within seconds, the last one too.
"""

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import grpc

from etude.common.errors import EtudeError, ForbiddenError, FullError, Problem, UserError
from etude.common.token_bucket import TokenBucket

log = logging.getLogger(__name__)

RELOAD_S = 5.0
"""A changed file is noticed within so long."""
DEFAULT_LIMIT = 60_000
"""Requests or events a minute of a key without a limit, if the service has no other."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+@-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PREFIX = "etude_"
_MAX_KEY_CHARS = 256
_OPTIONS = frozenset({"tenant", "consent", "limit"})


class KeyScope(StrEnum):
    """Permissions of a key."""

    SERVE = "serve"
    """Ask the policy."""
    FEEDBACK = "feedback"
    """Send events of the key's own user."""
    USERS = "users"
    """Send events of every user of the tenant, as a product's server does."""
    EXPORT = "export"
    """Read the tenant's events."""
    ADMIN = "admin"
    """Erase users; promote, roll back, freeze."""


class KeyOwner(NamedTuple):
    """Owner of the key of a request."""

    user: str
    tenant: str
    scopes: frozenset[KeyScope]
    consent: str
    """Version of the terms that the tenant shows its users; empty: nothing is recorded."""
    limit: int
    """Requests or events a minute."""


class UnauthenticatedError(EtudeError):
    """The request carries no known key."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "Unauthenticated"


@dataclass(slots=True)
class ApiKeyFile:
    """Keys of a file, which may change."""

    path: Path
    num_processes: int = 1
    """Processes that share the rates."""
    clock: Callable[[], float] = time.monotonic
    default_limit: int = DEFAULT_LIMIT
    _owners: Mapping[bytes, KeyOwner] = field(default_factory=dict)
    _stamp: tuple[int, int] = (0, 0)
    """Time and size of the file that was read."""
    _read_s: float = 0.0
    _buckets: dict[bytes, TokenBucket] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        num_processes: int = 1,
        clock: Callable[[], float] = time.monotonic,
        default_limit: int = DEFAULT_LIMIT,
    ) -> "ApiKeyFile":
        """Read the file.

        Raises:
            UserError: it cannot be read, has no key, or has an invalid line.
        """
        file = cls(path, num_processes, clock, default_limit)
        file._read_first()
        return file

    def identify(self, key: str) -> KeyOwner:
        """Identify the owner of a key.

        Raises:
            UnauthenticatedError: the key is missing or unknown.
        """
        if self.clock() - self._read_s >= RELOAD_S:
            self.reload()
        owner = self._owners.get(_digest(key))
        if owner is None:
            raise UnauthenticatedError("the API key is missing or unknown")
        return owner

    def count(self, key: str, num_items: int = 1) -> None:
        """Count requests or events of a known key.

        Raises:
            FullError: the key's rate is exceeded for now; none were counted.
        """
        digest, now_s = _digest(key), self.clock()
        limit = self._owners[digest].limit
        bucket = self._buckets.get(digest)
        if bucket is None:
            burst = max(1.0, limit / self.num_processes)
            bucket = TokenBucket.full(burst / 60, burst, at_s=now_s)
        bucket = bucket.refill(now_s)
        # More items than a full bucket has would never be let through: they may overdraw it.
        if bucket.tokens < min(num_items, bucket.burst):
            what = f"more than {limit} requests or events a minute"
            raise FullError(what, retry_after_s=bucket.wait_s(min(num_items, bucket.burst)))
        self._buckets[digest] = bucket.take(num_items)

    def reload(self) -> None:
        """Read the file if it has changed; one that cannot be read takes every consent back.

        A line that cannot be read has no key, and the other lines count: no mistake in one of them
        may keep a key alive that was removed.
        """
        try:
            lines = self._read_lines()
        except UserError as error:
            log.error("nothing is recorded until the keys can be read: %s", error)  # noqa: TRY400 - the text says all
            self._owners = {d: owner._replace(consent="") for d, owner in self._owners.items()}
            self._stamp = (0, 0)
            return
        if lines is not None:
            self._owners = self._parse(lines, on_problem=lambda error: log.error("%s", error))

    def _read_first(self) -> None:
        """Read the file.

        Raises:
            UserError: it cannot be read, has no key, or has an invalid line.
        """

        def refuse(error: UserError) -> None:
            raise error

        self._owners = self._parse(self._read_lines() or [], on_problem=refuse)
        if not self._owners:
            raise UserError(_keys_problem("holds no key", str(self.path)))

    def _read_lines(self) -> Sequence[str] | None:
        """Lines of the file; None if it is as it was.

        Raises:
            UserError: it cannot be read.
        """
        self._read_s = self.clock()
        try:
            status = self.path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if stamp == self._stamp:
                return None
            lines = self.path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(_keys_problem(str(error), str(self.path))) from error
        self._stamp = stamp
        return lines

    def _parse(
        self, lines: Sequence[str], *, on_problem: Callable[[UserError], None]
    ) -> Mapping[bytes, KeyOwner]:
        self._buckets.clear()
        owners: dict[bytes, KeyOwner] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            try:
                digest, owner = _parse_line(
                    line.split(), f"{self.path}:{number}", self.default_limit
                )
            except UserError as error:
                on_problem(error)
            else:
                owners[digest] = owner
        return owners


def read_bearer(header: str) -> str:
    """Key in an Authorization header; empty if it holds none."""
    scheme, _, key = header.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def require_scope(owner: KeyOwner, *scopes: KeyScope) -> None:
    """Refuse a caller that has none of the scopes.

    Raises:
        ForbiddenError: naming the scopes.
    """
    if not owner.scopes & set(scopes):
        raise ForbiddenError(f"the API key of {owner.user} lacks the scope {' or '.join(scopes)}")


def make_key(user: str, scopes: str) -> tuple[str, str]:
    """Make a key, and its line in the key file.

    Raises:
        UserError: the user or a scope cannot be used.
    """
    key = _PREFIX + secrets.token_urlsafe(32)
    words = [user, scopes, _digest(key).hex()]
    _parse_line(words, user, DEFAULT_LIMIT)
    return key, " ".join(words)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key[:_MAX_KEY_CHARS].encode("utf-8", "replace")).digest()


def _parse_line(words: Sequence[str], where: str, default_limit: int) -> tuple[bytes, KeyOwner]:
    if len(words) < 3 or not _NAME.fullmatch(words[0]) or not _DIGEST.fullmatch(words[2]):
        raise UserError(_keys_problem("is not `user scopes digest`", where))
    options = dict(word.partition("=")[::2] for word in words[3:])
    if options.keys() - _OPTIONS or not all(map(_NAME.fullmatch, options.values())):
        raise UserError(
            _keys_problem(f"has options other than {', '.join(sorted(_OPTIONS))}", where)
        )
    try:
        scopes = frozenset(map(KeyScope, words[1].split(",")))
    except ValueError:
        raise UserError(
            _keys_problem(f"has scopes other than {', '.join(KeyScope)}", where)
        ) from None
    limit = options.get("limit", str(default_limit))
    if not limit.isdecimal() or not 0 < int(limit) <= 10_000_000:
        raise UserError(_keys_problem("has a limit that is no number of requests a minute", where))
    tenant, consent = options.get("tenant", ""), options.get("consent", "")
    return bytes.fromhex(words[2]), KeyOwner(words[0], tenant, scopes, consent, int(limit))


def _keys_problem(what: str, where: str) -> Problem:
    fix = "make a key: etude-gateway key USER SCOPES, or etude-feedback, and add tenant=… consent=…"
    return Problem("InvalidKeys", what, where, fix)

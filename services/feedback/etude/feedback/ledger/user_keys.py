"""Secrets of a ledger: digests that replace names, and the keys of users.

    user digest        HMAC-SHA256(ledger secret, "user" | tenant | user), 32 hexadecimal digits
    key of a user      32 random bytes, wrapped by AES-256-GCM under the ledger secret

A user's events are unreadable once the key object is deleted. Keys therefore lie in a store of
their own, without versions of objects and without backups.
"""

import hmac
import itertools
import os
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from etude.common.blobs import ExistsError, MissingError, Store
from etude.common.errors import CorruptError, Problem, UserError

SECRET_BYTES = 32
KEYS = "keys/"
_KEY_BYTES = 32
_NONCE_BYTES = 12
_TAG_BYTES = 16
_CHECKED_KEYS = 8
"""One damaged object is no other secret."""
_CACHED_KEYS = 50_000
"""Keys in memory: 10 MB."""
_HEX = re.compile(r"[0-9a-f]{64}")


class UserId(NamedTuple):
    """A user as the ledger knows one: without the name."""

    tenant: str
    digest: str


@dataclass(frozen=True, slots=True)
class LedgerSecret:
    """Secret of one ledger, from which digests and the wrapping key are derived."""

    master: bytes = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read 64 hexadecimal digits from a file.

        Raises:
            UserError: the file cannot be read, or holds something else.
        """
        try:
            text = path.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(_secret_problem("cannot be read", path)) from error
        if not _HEX.fullmatch(text):
            raise UserError(_secret_problem("holds no 64 hexadecimal digits", path))
        return cls(bytes.fromhex(text))

    def user_id(self, tenant: str, user: str) -> UserId:
        """Name of a user in the ledger."""
        return UserId(tenant, self._derive("user", tenant, user)[:16].hex())

    def event_digest(self, tenant: str, user: str, source: str, event_id: str) -> bytes:
        """Name of an event in the ledger, of 16 bytes.

        It depends on the user: else one user of a tenant could take the ids of another's events.
        """
        return self._derive("event", tenant, user, source, event_id)[:16]

    def redaction_key(self, tenant: str) -> bytes:
        """Key of the digests that stand for a tenant's secrets."""
        return self._derive("redaction", tenant)

    def task_id(self, tenant: str, rollout: str) -> str:
        """Name of the task that a session becomes, by which only this ledger finds its user."""
        return f"session-{self._derive('task', tenant, rollout)[:8].hex()}"

    def wrapping_key(self) -> bytes:
        """Key under which the keys of users are stored."""
        return self._derive("wrapping")

    def _derive(self, *names: str) -> bytes:
        # Names have no NUL, so that no two lists of names give the same message.
        return hmac.digest(self.master, "\0".join(names).encode(), sha256)


@dataclass(slots=True)
class UserKeys:
    """Keys of users in a store; the methods block, and are safe to call from threads."""

    store: Store
    secret: LedgerSecret
    _cache: OrderedDict[tuple[UserId, int], bytes] = field(default_factory=OrderedDict)
    _destroyed: dict[UserId, int] = field(default_factory=dict)
    """Newest generation of which the key was destroyed: a thread may still hold it."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check_secret(self) -> None:
        """Check that the secret opens stored keys; without any, every secret is right.

        Raises:
            UserError: it opens none of those that were tried.
            StoreError: the store did not answer.
        """
        failure: CorruptError | None = None
        for info in itertools.islice(self.store.list(KEYS), _CHECKED_KEYS):
            try:
                self._unwrap(info.key, self.store.get(info.key))
            except MissingError:  # the user was erased a moment ago
                continue
            except CorruptError as error:
                failure = error
            else:
                return
        if failure is not None:
            fix = "name the file with the secret under which the ledger was begun"
            raise UserError(
                Problem("InvalidSecret", str(failure), "ETUDE_FEEDBACK_SECRET_FILE", fix)
            )

    def cached_key(self, user: UserId, generation: int) -> bytes | None:
        """A key that is in memory."""
        return self._cache.get((user, generation))

    def find(self, user: UserId, generation: int) -> bytes | None:
        """The key of a user; None if there is none, or no longer.

        Raises:
            CorruptError: the object is damaged, or was wrapped under another secret.
            StoreError: the store did not answer.
        """
        cached = self.cached_key(user, generation)
        if cached is not None:
            return cached
        name = _object_key(user, generation)
        try:
            wrapped = self.store.get(name)
        except MissingError:
            return None
        return self._remember(user, generation, self._unwrap(name, wrapped))

    def find_or_create(self, user: UserId, generation: int) -> bytes:
        """The key of a user, made on first use.

        Raises:
            CorruptError: the object is damaged, or was wrapped under another secret.
            StoreError: the store did not answer.
        """
        known = self.find(user, generation)
        if known is not None:
            return known
        name = _object_key(user, generation)
        key, nonce = os.urandom(_KEY_BYTES), os.urandom(_NONCE_BYTES)
        wrapped = nonce + AESGCM(self.secret.wrapping_key()).encrypt(nonce, key, name.encode())
        try:
            self.store.create(name, wrapped)
        except ExistsError:  # another thread's, or our own whose reply was lost
            return self._remember(user, generation, self._unwrap(name, self.store.get(name)))
        if generation <= self._destroyed.get(user, -1):  # the user was erased meanwhile
            self.store.delete([name])
        return self._remember(user, generation, key)

    def destroy(self, user: UserId, generation: int) -> None:
        """Delete the key of a user, and all before it.

        Raises:
            StoreError: the store did not answer.
        """
        with self._lock:
            self._destroyed[user] = generation
            for number in range(generation + 1):
                self._cache.pop((user, number), None)
        self.store.delete([_object_key(user, number) for number in range(generation + 1)])

    def _unwrap(self, name: str, wrapped: bytes) -> bytes:
        where = f"{self.store.url}/{name}"
        if len(wrapped) != _NONCE_BYTES + _KEY_BYTES + _TAG_BYTES:
            raise CorruptError(f"{where}: {len(wrapped)} bytes are no key")
        try:
            return AESGCM(self.secret.wrapping_key()).decrypt(
                wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:], name.encode()
            )
        except InvalidTag:
            raise CorruptError(f"{where}: damaged, or wrapped under another secret") from None

    def _remember(self, user: UserId, generation: int, key: bytes) -> bytes:
        with self._lock:
            if generation > self._destroyed.get(user, -1):
                self._cache[user, generation] = key
            while len(self._cache) > _CACHED_KEYS:
                self._cache.popitem(last=False)
        return key


def _object_key(user: UserId, generation: int) -> str:
    tenant = user.tenant.encode().hex()
    return f"{KEYS}{tenant}/{user.digest}/{generation:06d}"


def _secret_problem(what: str, path: Path) -> Problem:
    fix = "write one: openssl rand -hex 32 > FILE, and keep it: without it no event can be read"
    return Problem("InvalidSecret", what, str(path), fix)

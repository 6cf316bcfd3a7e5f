"""Credentials that the proxy adds to requests, and the check that no response echoes them."""

import base64
import binascii
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from etude.common.api.pool.network import EgressCredential
from etude.common.errors import EtudeError

_MAX_BYTES = 8 << 10
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_VALUE = re.compile(rb"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")
_MIN_WATCHED = 8
"""Shorter parts of a credential, such as its scheme, are in every answer."""


class CredentialError(EtudeError):
    """A credential cannot be used."""


@dataclass(frozen=True, slots=True)
class SecretFiles:
    """A folder with one folder for each Secret, and a file for each of its keys."""

    folder: Path | None = None

    def value(self, wanted: EgressCredential) -> bytes:
        """Read the header's value, each time again, so that a changed Secret takes effect.

        Raises:
            CredentialError: it is not there, or is not a valid header value.
        """
        secret, key = wanted.secret_ref.name, wanted.key
        where = f"Secret {secret!r} key {key!r}"
        if self.folder is None:
            raise CredentialError(f"{where}: this host has no secrets: set ETUDE_EGRESS_SECRETS")
        if not all(map(_NAME.fullmatch, (secret, key))):
            raise CredentialError(f"{where}: not a name")
        try:
            with (self.folder / secret / key).open("rb") as file:
                data = file.read(_MAX_BYTES + 1).strip()
        except OSError as error:
            raise CredentialError(f"{where} cannot be read: {error.strerror}") from error
        if len(data) > _MAX_BYTES or not _VALUE.fullmatch(data):
            raise CredentialError(f"{where} is not a header value: use one line of ASCII")
        return data


class CredentialEchoError(EtudeError):
    """A server echoes the credential that it was given."""


def watched_parts(value: bytes) -> frozenset[bytes]:
    """Parts of a header's value that must not come back: all of it, its token, a password in it."""
    parts = {value, *value.split()}
    scheme, _, rest = value.partition(b" ")
    if scheme.lower() == b"basic":
        try:
            pair = base64.b64decode(rest, validate=True)
        except binascii.Error:
            pair = b""
        parts |= {pair, pair.partition(b":")[2]}
    return frozenset(part for part in parts if len(part) >= _MIN_WATCHED) | {value}


@dataclass(slots=True)
class EchoGuard:
    """Filter of a stream that holds back a partial secret until it is complete or not."""

    secrets: frozenset[bytes]
    _held: bytes = field(default=b"")

    def check(self, parts: Iterable[bytes]) -> None:
        """Check that no secret is in any of these.

        Raises:
            CredentialEchoError: there is one.
        """
        for part in parts:
            if any(secret in part for secret in self.secrets):
                raise CredentialEchoError("the server sends the credential back")

    def filter(self, data: bytes) -> bytes:
        """Add data; returns the bytes that may be passed on.

        Raises:
            CredentialEchoError: a secret is in it.
        """
        data = self._held + data
        self.check([data])
        held = max((_overlap(data, secret) for secret in self.secrets), default=0)
        self._held = data[len(data) - held :]
        return data[: len(data) - held]

    def flush(self) -> bytes:
        """Return the held bytes at the end of the stream."""
        held, self._held = self._held, b""
        return held


def _overlap(data: bytes, secret: bytes) -> int:
    """Length of the longest end of the data that begins a secret."""
    for size in range(min(len(data), len(secret) - 1), 0, -1):
        if data.endswith(secret[:size]):
            return size
    return 0

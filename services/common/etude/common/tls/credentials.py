"""Certificates that are read again whenever their files change."""

import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from etude.common.errors import UserError
from etude.common.tls import material, metrics
from etude.common.tls.identity import Identity
from etude.common.tls.material import TlsMaterial

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Shortest time between two checks of the files."""


@dataclass(slots=True)
class Credentials:
    """The newest usable material of a folder; gRPC asks for it from its own threads."""

    folder: Path
    look_every_s: float = LOOK_EVERY_S
    _now: TlsMaterial = field(init=False)
    _stamp: str = field(init=False)
    _looked_s: float = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        """Read it for the first time.

        Raises:
            UserError: it cannot be used.
        """
        self._stamp = material.stamp(self.folder)
        self._now = material.read_material(self.folder)
        self._looked_s = time.monotonic()
        self._record_loaded()

    @property
    def identity(self) -> Identity:
        return self._now.identity

    def current(self) -> TlsMaterial:
        """Material to present now. Files that cannot be used leave the last usable ones."""
        with self._lock:
            if time.monotonic() - self._looked_s >= self.look_every_s:
                self._looked_s = time.monotonic()
                self._look()
            return self._now

    def _look(self) -> None:
        stamp = material.stamp(self.folder)
        if stamp == self._stamp:
            return
        try:
            found = material.read_material(self.folder)
        except UserError as error:
            # Perhaps between two of its files: the stamp stays, so that they are read again.
            metrics.UNREADABLE.inc()
            log.warning("certificates stay as they were: %s", error)
            return
        if found.identity != self._now.identity:
            for gauge in (metrics.EXPIRY, metrics.BEGIN):
                gauge.remove(self._now.identity.uri)
        self._now, self._stamp = found, stamp
        self._record_loaded()

    def _record_loaded(self) -> None:
        metrics.LOADED.inc()
        metrics.EXPIRY.labels(self._now.identity.uri).set(self._now.not_after.timestamp())
        metrics.BEGIN.labels(self._now.identity.uri).set(self._now.not_before.timestamp())
        log.info("certificate of %s until %s", self._now.identity.uri, self._now.not_after)

    def for_server(self, *, asks: bool = True) -> grpc.ServerCredentials:
        """Shows the newest of our certificates at each handshake.

        Args:
            asks: require a certificate of every client; else all clients are answered.
        """
        given: list[TlsMaterial] = [self.current()]

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            newest = self.current()
            if newest is given[0]:
                return None
            given[0] = newest
            return _configuration(newest)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(given[0]),
            fetch,  # type: ignore[arg-type]  # None, for no change, is missing in the stubs
            require_client_authentication=asks,
        )


def for_channel(shown: TlsMaterial) -> grpc.ChannelCredentials:
    """Fixed for the life of a channel: gRPC has no other for clients."""
    return grpc.ssl_channel_credentials(shown.ca, shown.key, shown.certificate)


def _configuration(shown: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(shown.key, shown.certificate)], root_certificates=shown.ca
    )

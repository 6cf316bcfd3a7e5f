"""Addresses of a pool's brokers, resolved again as the pool changes."""

import asyncio
import ipaddress
import logging
import socket
import time
from dataclasses import dataclass

from etude.common.pools.broker_shards import parse_targets
from etude.common.tls import targets
from etude.common.tls.transport import process_security

log = logging.getLogger(__name__)

RESOLVE_EVERY_S = 5.0
FIRST_WAIT_S = 1.0


@dataclass(slots=True)
class BrokerAddresses:
    """Targets behind a list of host:port. A headless Service has one for each of its pods."""

    text: str
    _found: tuple[str, ...] = ()
    _resolved_s: float = -RESOLVE_EVERY_S
    _resolving: "asyncio.Task[None] | None" = None

    async def targets(self) -> tuple[str, ...]:
        """The newest targets, resolved again when they are old; the last ones if DNS fails.

        Only the first call waits for DNS, and not for long: heartbeats depend on it.
        """
        is_old = time.monotonic() - self._resolved_s >= RESOLVE_EVERY_S
        if is_old and (self._resolving is None or self._resolving.done()):
            self._resolved_s = time.monotonic()
            self._resolving = asyncio.create_task(self._resolve(), name="resolve-brokers")
        if not self._found and self._resolving is not None:
            await asyncio.wait([self._resolving], timeout=FIRST_WAIT_S)
        return self._found or parse_targets(self.text)

    async def _resolve(self) -> None:
        parts = await asyncio.gather(*map(_resolve, parse_targets(self.text)))
        self._found = tuple(dict.fromkeys(each for part in parts for each in part)) or self._found


async def _resolve(target: str) -> list[str]:
    name, _, address = target.rpartition("@")
    host, _, port = address.rpartition(":")
    if _is_address(host):
        return [target]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM
        )
    except (OSError, ValueError) as error:
        log.debug("no address of %s: %s", host, error)
        return []
    addresses = sorted({_join_port(str(each[4][0]), port) for each in found})
    if not name and process_security().credentials is not None:
        # The certificate is that of the Service, which an address does not say.
        name = service_name(host)
    return [targets.named_target(name, each) if name else each for each in addresses]


def service_name(host: str) -> str:
    """Name of the certificate of a Service or of one of its pods; empty for other hosts."""
    if host == "localhost":
        return ""
    labels = host.split(".")
    match labels:
        case [service] | [_, service]:
            return service
        case [_, service, space, "svc", *_] | [service, space, "svc", *_]:
            return f"{service}.{space}.svc"
        case _:
            return ""


def _join_port(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost"
    return True

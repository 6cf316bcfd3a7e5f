"""Connections of the proxy to the public network: names are resolved, addresses checked.

A name is looked up once, every address is checked, and the connection goes to an address that was
checked, never to the name again, so DNS rebinding has no effect.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from typing_extensions import override

from etude.common.errors import EtudeError
from etude.envserver.egress.byte_streams import ByteStream, SocketStream

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_UNICAST = ipaddress.IPv6Network("2000::/3")
"""All global unicast addresses of IPv6; any other address is not public."""
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
"""NAT64: an IPv4 address in the last four bytes."""
_NEVER = tuple(
    map(
        ipaddress.ip_network,
        (
            "169.254.0.0/16",  # link-local: 169.254.169.254 of every cloud
            *("100.64.0.0/10", "168.63.129.16/32", "192.0.0.0/24"),  # Alibaba, Azure, Oracle
            *("192.88.99.0/24", "2002::/16"),  # 6to4
            "2001::/23",  # Teredo, ORCHID and their kin
            *("2001:db8::/32", "3fff::/20"),  # for documentation: free for private use
        ),
    )
)
"""Listed here, so that no release of Python decides about it."""


def is_public(text: str) -> bool:
    """True for an address of the public network that leads to no private one."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return _is_plain(address)
    if address.scope_id is not None:
        return False
    if address in _TRANSLATED:
        return _is_plain(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
    return address in _UNICAST and _is_plain(address)


def public_addresses(addresses: Iterable[str]) -> tuple[str, ...]:
    """All of them if each is public, else none.

    One private address among public ones is an attempt to have it used at the second try.
    """
    found = tuple(addresses)
    return found if all(map(is_public, found)) else ()


def _is_plain(address: Address) -> bool:
    if any(address.version == net.version and address in net for net in _NEVER):
        return False
    is_odd = address.is_multicast or address.is_reserved or address.is_unspecified
    return address.is_global and not is_odd


LOOKUP_S = 10.0
CONNECT_S = 15.0
_MAX_ADDRESSES = 4
_MAX_LOOKUPS = 128
"""Concurrent look-ups of all environments of a host. Idle threads are not started."""
_MAX_OWN_LOOKUPS = 2
"""Concurrent look-ups of one environment: a slow one cannot be cancelled and keeps its thread."""
_KEPT_S = 10.0
"""Lifetime of a cached answer: a client that opens a dozen connections asks once."""


class UnreachableError(EtudeError):
    """An allowed host does not answer."""


class NotPublicError(EtudeError):
    """A name resolves to an address that no environment may reach."""


class Resolver(Protocol):
    """Looks names up."""

    async def addresses(self, host: str) -> Sequence[str]:
        """Addresses of a host, in order of preference.

        Raises:
            OSError: there is no such host, or no name server answers.
        """
        ...


class Connector(Protocol):
    """Opens connections to addresses."""

    async def connect(self, address: str, port: int, *, tls_name: str | None) -> ByteStream:
        """Open a connection; with a name, TLS to a server that proves it.

        Raises:
            OSError: the server does not answer, or does not prove its name.
        """
        ...


@dataclass(slots=True)
class SystemResolver(Resolver):
    """Asks the host's own name servers, in threads of its own."""

    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_MAX_LOOKUPS, thread_name_prefix="lookup")
    )

    @override
    async def addresses(self, host: str) -> Sequence[str]:
        # With the dot at its end a name is complete: no search list makes it another one.
        ask = partial(socket.getaddrinfo, f"{host}.", None, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self.threads, ask)
        return list(dict.fromkeys(str(each[4][0]) for each in found))


@dataclass(slots=True, eq=False)
class HostLookups:
    """Look-ups of one environment: few at a time, each answer cached for a while."""

    kept_s: float = _KEPT_S
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_OWN_LOOKUPS))
    _answers: dict[str, tuple[float, tuple[str, ...]]] = field(default_factory=dict)
    """By host: expiry on the loop's clock, and addresses."""
    _under_way: dict[str, asyncio.Task[tuple[str, ...]]] = field(default_factory=dict)

    async def addresses(self, resolver: Resolver, host: str) -> Sequence[str]:
        """Addresses of a host, cached.

        Raises:
            OSError: there is no such host, or no name server answers.
        """
        if not self._is_known(host):
            await self.slots.acquire()
            if self._is_known(host):
                self.slots.release()
            else:
                asking = self._ask(resolver, host)
                self._under_way[host] = asyncio.create_task(asking, name="egress look-up")
        if host not in self._under_way:
            return self._answers[host][1]
        # The caller may give up; the thread goes on, and keeps its slot.
        return await asyncio.shield(self._under_way[host])

    def _is_known(self, host: str) -> bool:
        """True if a look-up is cached or in progress."""
        until_s, _ = self._answers.get(host, (0.0, ()))
        return host in self._under_way or asyncio.get_running_loop().time() < until_s

    async def _ask(self, resolver: Resolver, host: str) -> tuple[str, ...]:
        try:
            found = tuple(await resolver.addresses(host))
        finally:
            del self._under_way[host]
            self.slots.release()
        self._answers[host] = (asyncio.get_running_loop().time() + self.kept_s, found)
        return found


@dataclass(slots=True)
class SocketConnector(Connector):
    """Opens sockets of the host."""

    context: ssl.SSLContext = field(default_factory=ssl.create_default_context)
    """Trusted authorities for TLS servers."""

    @override
    async def connect(self, address: str, port: int, *, tls_name: str | None) -> ByteStream:
        secured = {} if tls_name is None else {"ssl": self.context, "server_hostname": tls_name}
        reader, writer = await asyncio.open_connection(address, port, **secured)  # type: ignore[arg-type] # the two belong together
        return SocketStream(reader, writer)


class UpstreamTarget(NamedTuple):
    """Destination of a connection."""

    host: str
    port: int
    is_tls: bool


@dataclass(slots=True)
class Upstream:
    """Opens connections to the public network only."""

    resolver: Resolver = field(default_factory=SystemResolver)
    connector: Connector = field(default_factory=SocketConnector)

    async def connect(self, target: UpstreamTarget, lookups: HostLookups) -> ByteStream:
        """Connect to a host by its canonical name.

        Args:
            target: the destination.
            lookups: of the environment that asks.

        Raises:
            NotPublicError: it is not on the public network.
            UnreachableError: it does not answer.
        """
        try:
            async with asyncio.timeout(LOOKUP_S):
                found = await lookups.addresses(self.resolver, target.host)
        except (OSError, UnicodeError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            raise UnreachableError(f"{target.host} cannot be looked up: {why}") from error
        checked = public_addresses(found)
        if not checked:
            raise NotPublicError(f"{target.host} is not on the public network")
        return await self._first(checked[:_MAX_ADDRESSES], target)

    async def _first(self, checked: Sequence[str], target: UpstreamTarget) -> ByteStream:
        why = "no answer"
        tls_name = target.host if target.is_tls else None
        for address in checked:
            try:
                async with asyncio.timeout(CONNECT_S):
                    return await self.connector.connect(address, target.port, tls_name=tls_name)
            except (OSError, TimeoutError) as error:
                why = str(error) or type(error).__name__
        raise UnreachableError(f"{target.host} port {target.port} cannot be reached: {why}")

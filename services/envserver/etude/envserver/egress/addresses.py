"""Which addresses are the public network's, whatever they are written as."""

import ipaddress
from collections.abc import Iterable, Iterator

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_TRANSLATED = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "::/96")))
"""IPv6 addresses whose last four bytes are an IPv4 address that a gateway would reach."""
_NEVER = tuple(
    map(
        ipaddress.ip_network,
        (
            *("169.254.0.0/16", "fe80::/10"),  # link-local: 169.254.169.254 of every cloud
            *("100.64.0.0/10", "168.63.129.16/32", "192.0.0.0/24"),  # Alibaba, Azure, Oracle
            *("fd00:ec2::/32", "fc00::/7"),  # AWS over IPv6
            *("192.88.99.0/24", "2002::/16", "2001::/23"),  # 6to4, Teredo and their kin
        ),
    )
)
"""Refused by name here, so that no release of Python decides about it."""


def is_public(text: str) -> bool:
    """Whether this is an address of the public network, and not the way into another one."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return all(_is_plain(each) for each in _readings(address))


def public(addresses: Iterable[str]) -> tuple[str, ...]:
    """All of them if each is public, else none.

    One private address among public ones is somebody's attempt to have it taken at the second try.
    """
    found = tuple(addresses)
    return found if all(map(is_public, found)) else ()


def _readings(address: Address) -> Iterator[Address]:
    yield address
    if not isinstance(address, ipaddress.IPv6Address):
        return
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    if any(address in network for network in _TRANSLATED):
        yield ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)


def _is_plain(address: Address) -> bool:
    if any(address.version == net.version and address in net for net in _NEVER):
        return False
    is_odd = address.is_multicast or address.is_reserved or address.is_unspecified
    return address.is_global and not is_odd and getattr(address, "scope_id", None) is None

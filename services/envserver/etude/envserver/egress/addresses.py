"""Which addresses are the public network's, whatever they are written as."""

import ipaddress
from collections.abc import Iterable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_UNICAST = ipaddress.IPv6Network("2000::/3")
"""All of IPv6 that is handed out to anybody: what is not in it is no public address."""
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
"""What name servers of networks without IPv4 make of an IPv4 address: its last four bytes."""
_NEVER = tuple(
    map(
        ipaddress.ip_network,
        (
            "169.254.0.0/16",  # link-local: 169.254.169.254 of every cloud
            *("100.64.0.0/10", "168.63.129.16/32", "192.0.0.0/24"),  # Alibaba, Azure, Oracle
            *("192.88.99.0/24", "2002::/16"),  # 6to4
            "2001::/23",  # Teredo, ORCHID and their kin
            *("2001:db8::/32", "3fff::/20"),  # for documentation: free for anybody's own use
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
    if isinstance(address, ipaddress.IPv4Address):
        return _is_plain(address)
    if address.scope_id is not None:
        return False
    if address in _TRANSLATED:
        return _is_plain(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
    return address in _UNICAST and _is_plain(address)


def public(addresses: Iterable[str]) -> tuple[str, ...]:
    """All of them if each is public, else none.

    One private address among public ones is somebody's attempt to have it taken at the second try.
    """
    found = tuple(addresses)
    return found if all(map(is_public, found)) else ()


def _is_plain(address: Address) -> bool:
    if any(address.version == net.version and address in net for net in _NEVER):
        return False
    is_odd = address.is_multicast or address.is_reserved or address.is_unspecified
    return address.is_global and not is_odd

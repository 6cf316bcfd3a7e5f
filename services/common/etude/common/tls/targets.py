"""Targets of channels: the address to dial, and the server name to expect there."""

import ipaddress
from typing import NamedTuple

from etude.common.errors import Problem, UserError

REASON = "InvalidTls"


class TlsTarget(NamedTuple):
    """Address to dial, and expected name of the server's certificate; empty if unknown."""

    address: str
    server_name: str


def named_target(server_name: str, address: str) -> str:
    """A target whose address does not say who answers there: NAME@HOST:PORT."""
    return f"{server_name}@{address}"


def parse_target(target: str, namespace: str = "") -> TlsTarget:
    """The parts of a target.

    `demo-trainer-0.demo-trainer:7000` names a pod and its Service, in the given namespace.
    """
    name, _, address = target.rpartition("@")
    return TlsTarget(address, _full(name, namespace) if name else _of_service(address, namespace))


def require_server_name(target: str, namespace: str) -> TlsTarget:
    """The parts of a target whose server must prove its name.

    Raises:
        UserError: the target says no name.
    """
    found = parse_target(target, namespace)
    if not found.server_name:
        fix = "name it by its Service, or as NAME@HOST:PORT"
        raise UserError(Problem(REASON, "does not name the server that answers there", target, fix))
    return found


def is_loopback(target: str) -> bool:
    """Return true if an address never leaves the machine."""
    address = parse_target(target).address
    host = address.rpartition(":")[0].strip("[]") if ":" in address else address
    if address.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _full(name: str, namespace: str) -> str:
    return name if "." in name else f"{name}.{namespace}.svc"


def _of_service(address: str, namespace: str) -> str:
    host = address.rpartition(":")[0]
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        labels = host.split(".")
    else:
        return ""
    match labels:
        case [_, service]:
            return f"{service}.{namespace}.svc"
        case [_, service, space, "svc", *_]:
            return f"{service}.{space}.svc"
        case [service, space, "svc", *_]:
            return f"{service}.{space}.svc"
        case _:
            return ""

"""Loopback ports of container ports, and addresses with them."""

import errno
import random
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from etude.operator import names

LOOPBACK = "127.0.0.1"

# Below the range from which Linux takes ports of outgoing connections: a port that is free now
# is still free when the role binds it.
FIRST, LAST = 15_000, 32_000

_ADDRESS = re.compile(r"(?<![\w.-])([a-z0-9][-a-z0-9]*(?:\.[a-z0-9][-a-z0-9]*)*):(\d{2,5})(?!\d)")
_ORDINAL = re.compile(r"^(?P<workload>.+)-\d+$")


@dataclass(slots=True)
class PortRegistry:
    """Assigns a loopback port to each container port of each pod at its first use."""

    _ports: dict[tuple[str, int], int] = field(default_factory=dict)

    def port(self, pod: str, container_port: int) -> int:
        """The loopback port behind a container port.

        Raises:
            OSError: no port is free.
        """
        key = (pod, container_port)
        if key not in self._ports:
            self._ports[key] = self._free()
        return self._ports[key]

    def _free(self) -> int:
        taken = set(self._ports.values())
        for port in random.sample(range(FIRST, LAST), 1_000):
            if port not in taken and _can_bind(port):
                return port
        raise OSError(errno.EADDRINUSE, f"no free port on {LOOPBACK} from {FIRST} to {LAST}")


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def pod_of_address(host: str, *, is_service: Callable[[str], bool]) -> str | None:
    """The pod of a DNS name, pod.service or a Service of one pod; else None."""
    first, *rest = host.split(".")
    match = _ORDINAL.match(first)
    if match is not None and rest and rest[0] == match["workload"]:
        return first
    # A pool's Service may not be there yet when the pods that call its brokers are made.
    is_known = is_service(first) or first.endswith(f"-{names.BROKER}")
    return f"{first}-0" if is_known else None


def rewrite_addresses(text: str, resolve: Callable[[str, int], str | None]) -> str:
    """The text with every resolvable address replaced by its loopback address."""

    def replace(match: re.Match[str]) -> str:
        return resolve(match[1], int(match[2])) or match[0]

    return _ADDRESS.sub(replace, text)

"""Ports for servers that tests start as processes of their own.

A server binds its port seconds after a test chose it. A port that the kernel handed out for the
choice may meanwhile become the near end of somebody's connection, and a port that another test
chose at the same time is taken: both made servers fail to start.
"""

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

PORTS = range(15_000, 32_000)
"""Below those that Linux gives to connections (32768 and above by default)."""
_FOLDER = Path(tempfile.gettempdir()) / "etude-test-ports"
_locks: list[int] = []


def reserve_port() -> int:
    """A port that nobody listens on and that no other test process is given while this one lives.

    Raises:
        OSError: every port of the range is taken.
    """
    _FOLDER.mkdir(exist_ok=True)
    for port in random.sample(PORTS, len(PORTS)):
        if _lock(port) and _nobody_listens(port):
            return port
    raise OSError(f"every port from {PORTS.start} to {PORTS.stop - 1} is taken")


def reserve_ports(count: int) -> list[int]:
    """As many different ports."""
    return [reserve_port() for _ in range(count)]


def _lock(port: int) -> bool:
    """Take the lock of a port; the kernel drops it when this process ends, however it ends."""
    descriptor = os.open(_FOLDER / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return False
    _locks.append(descriptor)
    return True


def _nobody_listens(port: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False

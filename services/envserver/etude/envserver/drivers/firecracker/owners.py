"""Whom machines run as: each as a user of its own, in a network with nothing in it."""

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from etude.envserver.drivers.machines.errors import VmmError
from etude.envserver.drivers.sandbox import kernel

USERS = range(600_000, 660_000)
"""Beyond those that distributions give to people, services and containers."""


@dataclass(slots=True)
class Users:
    """Hands each user number out once at a time."""

    _taken: set[int] = field(default_factory=set)
    _next: int = 0

    def take(self) -> int:
        """A number that is nobody's.

        Raises:
            VmmError: all are taken.
        """
        for step in range(len(USERS)):
            found = USERS[(self._next + step) % len(USERS)]
            if found not in self._taken:
                # Not the next free one: a number rests before it is somebody else's.
                self._next = found - USERS.start + 1
                self._taken.add(found)
                return found
        raise VmmError(f"all {len(USERS)} users for machines are taken")

    def keep(self, numbers: Iterable[int]) -> None:
        """Count those of machines that run already."""
        self._taken.update(numbers)

    def give(self, number: int) -> None:
        """Take a number back."""
        self._taken.discard(number)


def empty_network() -> int:
    """An open network namespace with nothing in it; it ends with its last user and this file.

    Raises:
        VmmError: the kernel makes none.
    """
    found: list[int | OSError] = []

    def leave() -> None:
        try:
            kernel.unshare(kernel.NEW_NETWORK, "a network of its own")
            found.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as cause:
            found.append(cause)

    # Only the thread leaves the node's network, and ends.
    thread = threading.Thread(target=leave, name="network of machines")
    thread.start()
    thread.join()
    (outcome,) = found
    if isinstance(outcome, OSError):
        raise VmmError(f"there is no network namespace for machines: {outcome}") from outcome
    return outcome

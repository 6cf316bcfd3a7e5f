"""User ids of VMs, one for each, and their empty network namespace."""

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.isolation import syscalls

UIDS = range(600_000, 660_000)
"""Above those that distributions give to people, services and containers."""


@dataclass(slots=True)
class UidPool:
    """Pool of user ids; each is used by one VM at a time."""

    _taken: set[int] = field(default_factory=set)
    _next: int = 0

    def take(self) -> int:
        """Take a free user id.

        Raises:
            VmmError: all are in use.
        """
        for step in range(len(UIDS)):
            found = UIDS[(self._next + step) % len(UIDS)]
            if found not in self._taken:
                # Round robin: a user id rests before it is used again.
                self._next = found - UIDS.start + 1
                self._taken.add(found)
                return found
        raise VmmError(f"all {len(UIDS)} user ids for VMs are in use")

    def reserve(self, numbers: Iterable[int]) -> None:
        """Reserve the user ids of running VMs."""
        self._taken.update(numbers)

    def give(self, number: int) -> None:
        self._taken.discard(number)


def empty_network() -> int:
    """Open an empty network namespace; it ends with its last user and this descriptor.

    Raises:
        VmmError: the kernel does not allow it.
    """
    found: list[int | OSError] = []

    def leave() -> None:
        try:
            syscalls.unshare(syscalls.NEW_NETWORK, "a network of its own")
            found.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as cause:
            found.append(cause)

    # Only this thread leaves the host's network, and then ends.
    thread = threading.Thread(target=leave, name="network of VMs")
    thread.start()
    thread.join()
    (outcome,) = found
    if isinstance(outcome, OSError):
        raise VmmError(f"cannot make a network namespace for VMs: {outcome}") from outcome
    return outcome

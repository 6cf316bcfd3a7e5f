"""User ids of VMs, one for each, and their empty network namespace."""

import os
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.isolation import syscalls

UIDS = range(600_000, 660_000)
"""Above those that distributions give to people, services and containers."""
_MAP = Path("/proc/self/uid_map")


@dataclass(slots=True)
class UidPool:
    """Pool of user ids; each is taken for one VM, and shared with those that are forked from it."""

    _taken: Counter[int] = field(default_factory=Counter)
    """VMs by user id."""
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
                self._taken[found] += 1
                return found
        raise VmmError(f"all {len(UIDS)} user ids for VMs are in use")

    def reserve(self, numbers: Iterable[int]) -> None:
        """Reserve the user ids of running VMs, one of each."""
        self._taken.update(numbers)

    def give(self, number: int) -> None:
        """Free the user id of a VM that has ended, if no other VM has it."""
        self._taken[number] -= 1
        if self._taken[number] <= 0:
            del self._taken[number]


def are_mapped() -> bool:
    """True if this process may give these user ids to others: it is root, and knows them all."""
    rows = [[int(each) for each in line.split()] for line in _MAP.read_text().splitlines()]
    is_known = any(first <= UIDS[0] and UIDS[-1] < first + count for first, _, count in rows)
    return os.geteuid() == 0 and is_known


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

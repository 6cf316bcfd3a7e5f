"""Jail of a VMM: what it may still do once its guest has taken it over.

Covered: its own user without capabilities or a way to get them, no new processes, limits on files,
writes and memory; of files it sees those that every user may see.
Not covered: network, mounts, and CPU share; those belong to the namespaces and the cgroup of the
host process.
"""

import functools
import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from etude.envserver.drivers.vm.uid_pool import UidPool

KVM = Path("/dev/kvm")
NOBODY = 65_534
_OWN_BYTES = 2 << 30
"""Address space on top of the guest's memory: libraries, translated code, thread stacks."""
_MAX_FILES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Jail:
    """User of one VM's process."""

    uid: int = NOBODY
    gid: int = NOBODY
    """With KVM: the group that may open /dev/kvm."""
    users: UidPool | None = field(default=None, compare=False)
    """Where each VM gets a user of its own; None: all have the same."""

    def take_user(self) -> "Jail":
        """Take a user for one more VM, until `give_user`.

        Raises:
            VmmError: all are in use.
        """
        return self if self.users is None else replace(self, uid=self.users.take())

    def share_user(self) -> None:
        """Count one more VM of this user: one that is forked keeps the user of its parent."""
        if self.users is not None:
            self.users.reserve([self.uid])

    def give_user(self) -> None:
        """Free the user for other VMs: a VM of it has ended."""
        if self.users is not None:
            self.users.give(self.uid)

    def command(
        self,
        program: Sequence[str],
        *,
        memory_bytes: int,
        file_bytes: int,
        inherited: Collection[int] = (),
    ) -> tuple[str, ...]:
        """Command line that sets limits and user before the program runs.

        QEMU's own -runas needs rights that its seccomp filter denies. Without root the program runs
        as this process's user, which suits one tenant.

        Args:
            program: the program and its arguments.
            memory_bytes: size of the guest's memory.
            file_bytes: size limit of each file that it writes.
            inherited: descriptors that it gets; it may replace them by other files.
        """
        limits = {
            "as": memory_bytes + _OWN_BYTES,
            "core": 0,
            "fsize": file_bytes,
            "nofile": max([_MAX_FILES, *(number + 1 for number in inherited)]),
        }
        words = [_program("prlimit"), *(f"--{name}={bound}" for name, bound in limits.items())]
        words += [_program("setpriv"), "--no-new-privs"]
        if os.geteuid() == 0:
            words += [f"--reuid={self.uid}", f"--regid={self.gid}", "--clear-groups"]
            words += ["--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all"]
        return (*words, *program)


def jail_with_kvm() -> Jail:
    """Jail whose user may open /dev/kvm, where a group may."""
    return Jail(gid=KVM.stat().st_gid) if KVM.exists() and os.geteuid() == 0 else Jail()


@functools.cache
def _program(name: str) -> str:
    return shutil.which(name) or f"/usr/bin/{name}"

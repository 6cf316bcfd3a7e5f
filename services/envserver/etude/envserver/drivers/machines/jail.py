"""What a machine monitor may still do once its guest has taken it over.

Covered: it runs as a user of its own without capabilities or a way to get them, starts no process,
and opens, writes and allocates within limits; it sees files only where every user of the host may.
Not covered: the host's network and mounts, and its share of CPU time: those belong to the
namespaces and the control group of the node.
"""

import functools
import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

KVM = Path("/dev/kvm")
NOBODY = 65_534
_OWN_BYTES = 2 << 30
"""Address space beside the guest's memory: libraries, translated code, thread stacks."""
_MAX_FILES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Jail:
    """The user of one machine. In production each machine has its own."""

    uid: int = NOBODY
    gid: int = NOBODY
    """With KVM: the group that may open /dev/kvm."""

    def command(
        self,
        program: Sequence[str],
        *,
        memory_bytes: int,
        file_bytes: int,
        inherited: Collection[int] = (),
    ) -> tuple[str, ...]:
        """A program as it is started: limits and user are set before it runs.

        QEMU's own way to change the user (-runas) needs rights that its filter denies. Without
        rights to change the user it runs as the node's own, which suits one tenant.

        Args:
            program: the program and its arguments.
            memory_bytes: size of the guest's memory.
            file_bytes: how long any file may grow that it writes.
            inherited: descriptors that it gets; it may put other files in their places.
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
    """A jail whose user may use the processor's virtual machines, where a group may at all."""
    return Jail(gid=KVM.stat().st_gid) if KVM.exists() and os.geteuid() == 0 else Jail()


@functools.cache
def _program(name: str) -> str:
    return shutil.which(name) or f"/usr/bin/{name}"

"""Probe of a container's isolation: whose kernel answers it, and which files it sees."""

import shlex
from pathlib import Path

from etude.agent.workspace import WorkspaceLostError
from etude.envserver.drivers.gvisor.runsc import RunscError
from etude.envserver.guest.calls import GuestCaller
from etude.envserver.guest.commands import GuestCommands

ROOT_UID = 0
_LIMIT_S = 60.0
_SEEN = "sees the file"


def host_kernel() -> str:
    """Version of this machine's kernel, as every process on it reads it."""
    return Path("/proc/version").read_text(encoding="utf-8").strip()


async def probe_isolation(container: GuestCaller, *, hidden: Path, kernel: str) -> None:
    """Ask a running container, as its root, what it is isolated from.

    Args:
        container: one of the pool's first image.
        hidden: a file of this machine that it must not see.
        kernel: version of this machine's kernel.

    Raises:
        RunscError: the machine's kernel answers it, it sees the file, or no command runs in it.
    """
    script = (
        "read -r version < /proc/version || exit 9; printf '%s\\n' \"$version\"; "
        f"if [ -e {shlex.quote(str(hidden))} ]; then echo '{_SEEN}'; fi"
    )
    commands = GuestCommands(channel=container, uid=ROOT_UID)
    try:
        done = await commands.run(script, _LIMIT_S)
    except WorkspaceLostError as cause:
        raise RunscError(
            f"a container did not answer the probe of its isolation: {cause}"
        ) from cause
    answer = done.output.decode(errors="replace")
    version, _, rest = answer.partition("\n")
    if done.exit_code != 0 or not version.strip():
        raise RunscError(
            f"a container cannot tell its kernel: exit code {done.exit_code}, {answer[:200]!r}"
        )
    if version.strip() == kernel:
        raise RunscError(f"the kernel of this machine answers its containers: {kernel[:200]}")
    if _SEEN in rest:
        raise RunscError(f"its containers see {hidden}, a file of this machine")

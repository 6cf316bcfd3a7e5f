"""Prewarm of a template before it is cloned, and the JIT warm-up of a fork server's guest."""

from etude.agent.workspace.interface import HOME
from etude.envserver.guest.channel import GuestChannel
from etude.envserver.guest.commands import GuestCommands
from etude.envserver.guest.workspace import GuestWorkspace
from etude.envserver.guest.workspace_files import write_tree
from etude.envserver.isolation.sandbox_layout import INSIDE_UID, LOGS, TESTS
from etude.envserver.storage.trees import File

_PREWARM_COMMAND = (
    f"mkdir -p {TESTS} {LOGS} && chown {INSIDE_UID}:{INSIDE_UID} {HOME} {LOGS}"
    " && sync; command -v python3 && python3 -c pass; command -v git && git --version; true"
)
"""Folders of every environment, and what a clone's first command would wait for."""
_LIMIT_S = 120.0
_SCRATCH = "warm-up"
_JIT_COMMAND = (
    "ls / | head -n 1; cat /etc/passwd | grep -c root; sed -n 1p /etc/passwd"
    "; command -v python3 && python3 -B -c 'import json, re, subprocess'"
    "; command -v git && git --version; true"
)
"""Programs whose translation is found again, in a guest with fixed addresses."""
_JIT_ROUNDS = 2
"""A second run takes other paths through the kernel than the first."""


async def prewarm_template(channel: GuestChannel) -> None:
    """Make folders, load what every command reads, and let the agent reserve its memory."""
    await GuestCommands(channel=channel, uid=0).run(_PREWARM_COMMAND, _LIMIT_S)
    run = GuestCommands(channel=channel).run
    files = GuestWorkspace(channel, run, cwd="/tmp")  # noqa: S108 - the guest's
    await files.write(_SCRATCH, bytes(4096))
    await files.read(_SCRATCH)
    await files.delete(_SCRATCH)


async def warm_up_jit(channel: GuestChannel) -> None:
    """Do what environments do first, and undo it: what stays is translated code.

    Raises:
        WorkspaceError: it could not write.
    """
    run = GuestCommands(channel=channel).run
    files = GuestWorkspace(channel, run, cwd=HOME)
    for _ in range(_JIT_ROUNDS):
        # Two at a time, for both workers of the agent.
        tree = {f"{_SCRATCH}-{number}": File(bytes(4096 * number)) for number in range(2)}
        await write_tree(channel, tree, root=HOME)
        for path in tree:
            await files.read(path)
            await files.delete(path)
        await run("echo $HOME", _LIMIT_S)
    await run(_JIT_COMMAND, _LIMIT_S)

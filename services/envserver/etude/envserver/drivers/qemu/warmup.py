"""What a template does before it is sealed, so that its clones find it done."""

from etude.agent.workspace.protocol import HOME
from etude.envserver.drivers.sandbox import layout
from etude.envserver.drivers.sandbox.layout import LOGS, TESTS
from etude.envserver.guest.channel import GuestChannel
from etude.envserver.guest.commands import GuestCommands
from etude.envserver.guest.workspace import GuestWorkspace

_LINE = (
    f"mkdir -p {TESTS} {LOGS} && chown {layout.INSIDE_UID}:{layout.INSIDE_UID} {HOME} {LOGS}"
    " && sync; command -v python3 && python3 -c pass; command -v git && git --version; true"
)
"""Folders that every environment has, and what the first command of a clone would wait for."""
_LIMIT_S = 120.0
_SCRATCH = "warm-up"


async def warm_up(channel: GuestChannel) -> None:
    """Make folders, read what every command needs, and have the agent reserve what it keeps.

    Raises:
        GuestLostError: the guest failed.
    """
    await GuestCommands(channel=channel, uid=0).run(_LINE, _LIMIT_S)
    run = GuestCommands(channel=channel).run
    files = GuestWorkspace(channel, run, cwd="/tmp")  # noqa: S108 - the guest's
    await files.write(_SCRATCH, bytes(4096))
    await files.read(_SCRATCH)
    await files.delete(_SCRATCH)

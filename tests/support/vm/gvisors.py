"""Containers of gVisor that tests leave behind."""

import asyncio
from pathlib import Path

from etude.envserver.drivers.gvisor import runsc
from etude.envserver.drivers.gvisor.runsc import RunscClient, RunscError


def missing() -> str:
    """Why there are none on this machine; empty if there can be."""
    try:
        asyncio.run(runsc.version())
    except RunscError as error:
        return str(error)
    return ""


def end_all(scratch: Path) -> None:
    """End what a node leaves for its successor, which will not come."""
    if not (scratch / "runsc").is_dir():
        return

    async def end() -> None:
        program = RunscClient(state=scratch / "runsc")
        for name in await program.containers():
            await program.end(name)

    asyncio.run(end())

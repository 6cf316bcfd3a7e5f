"""Nodes that kill themselves in the middle of their work, and what is asked of them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import cloudpickle

from etude.envserver.host.host import Host
from etude.v1 import environments_pb2

ROOT = Path(__file__).parents[3]
WRITE = "echo {} > state; echo {} > /tmp/memory"


def order(
    scratch: Path, *names: str, snapshot_id: str = ""
) -> environments_pb2.OpenEnvironmentsRequest:
    leases = [
        environments_pb2.HeldLease(
            lease=environments_pb2.Lease(
                lease_id=name,
                control_token="control",
                expires_unix_ms=round(1000 * (time.time() + 600)),
            ),
            run_id="run",
        )
        for name in names
    ]
    return environments_pb2.OpenEnvironmentsRequest(
        leases=leases,
        template="python",
        workspace=environments_pb2.WorkspaceSource(uri=(scratch.parent / "source").as_uri()),
        toolset="Standard",
        snapshot_id=snapshot_id,
    )


async def sh(node: Host, name: str, call_id: str, command: str) -> str:
    asked = environments_pb2.ToolCall(
        call_id=call_id, name="run_terminal", arguments_json=json.dumps({"command": command})
    )
    (result,) = await node.find(name).run_turn([asked])
    return result.content.decode().strip()


async def looked(node: Host, name: str, call_id: str) -> str:
    return await sh(node, name, call_id, "cat state /tmp/memory | tr '\\n' ' '")


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do it in a process that kills itself.

    In a new one: a fork of this one would wait for locks of threads that it does not have.
    """
    done = subprocess.run(
        [sys.executable, "-c", _RUN],
        input=cloudpickle.dumps(work),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
        timeout=300,
    )
    assert done.returncode == -signal.SIGKILL


_RUN = "import asyncio, sys, cloudpickle; asyncio.run(cloudpickle.load(sys.stdin.buffer)())"

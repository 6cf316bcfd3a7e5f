"""Small images with a repository, and leases whose tasks name one by digest."""

import asyncio
import json
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from tests.support import oci_layouts
from tests.support.oci_layouts import file, folder, link

from etude.envserver.host.host import Host
from etude.v1 import environments_pb2

PATIENCE_S = 240
"""A guest that is emulated boots in three seconds of a core that others use, too."""


SAY = b'#!/bin/sh\nexec echo "$@"\n'
ENV = ["PATH=/opt/bin:/bin", "WORD=of the image"]


PASSWD = b"root:x:0:0:root:/root:/bin/sh\nbuilder:x:1234:1234::/home/builder:/bin/sh\n"


def owned(member: oci_layouts.Member) -> oci_layouts.Member:
    """A file of the image's user."""
    member[0].uid = member[0].gid = 1234
    return member


def write_image(
    layout: Path,
    word: str,
    *,
    layers: Iterable[Iterable[oci_layouts.Member]] = (),
    **config: object,
) -> str:
    """An image with a shell and a repository in its working folder; returns its reference."""
    reading = ("sh", "cat", "grep", "ls", "id", "echo", "readlink", "tail")
    programs = (*reading, "mkdir", "rm", "mv", "dd")
    busybox = Path(shutil.which("busybox") or "busybox").read_bytes()
    base = [
        *(folder("bin"), folder("etc"), file("bin/busybox", busybox, mode=0o755)),
        *(link(f"bin/{name}", "busybox") for name in programs),
        file("bin/bash", b'#!/bin/sh\nexec /bin/sh "$@"\n', mode=0o755),
        *(file("etc/word", word.encode()), file("etc/passwd", PASSWD)),
        *(folder("opt"), folder("opt/bin"), file("opt/bin/say", SAY, mode=0o755)),
        *(folder("home"), owned(folder("home/builder")), owned(file("home/builder/notes"))),
    ]
    repository = [
        folder("app"),
        file("app/shop.txt", b"broken\n"),
        file("app/run", b"#!", mode=0o755),
        file("app/.gitignore", b"target/\n"),
        folder("app/target"),
        file("app/target/built", b"with the image\n"),
    ]
    digest = oci_layouts.write_layout(
        layout, base, repository, *layers, config={"WorkingDir": "/app", "Env": ENV, **config}
    )
    return f"{layout.as_uri()}@{digest}"


async def opened(
    host: Host, lease_id: str, image: str, uri: str = "empty:"
) -> environments_pb2.LaunchBatchResponse:
    request = environments_pb2.OpenEnvironmentsRequest(
        template="small",
        workspace=environments_pb2.WorkspaceSource(uri=uri),
        toolset="Standard",
        image=image,
    )
    lease = environments_pb2.Lease(
        lease_id=lease_id, agent_token="a", expires_unix_ms=round(1000 * (time.time() + 600))
    )
    request.leases.add(lease=lease, run_id="run", index=0)
    (outcome,) = await host.open(request)
    return outcome


async def settled(
    host: Host, lease_id: str, image: str, uri: str = "empty:"
) -> environments_pb2.LaunchBatchResponse:
    """The outcome of an order that is repeated until its image is here, or cannot be."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            outcome = await opened(host, lease_id, image, uri)
            if outcome.failure.reason != "ImageNotReady":
                return outcome
            await asyncio.sleep(0.1)


async def opened_at_last(host: Host, lease_id: str, image: str, uri: str = "empty:") -> None:
    outcome = await settled(host, lease_id, image, uri)
    assert outcome.HasField("lease"), outcome.failure.message


async def says(host: Host, lease_id: str, command: str) -> str:
    number = f"{lease_id}-{time.monotonic_ns()}"
    call = environments_pb2.ToolCall(
        call_id=number, name="run_terminal", arguments_json=json.dumps({"command": command})
    )
    (result,) = await host.find(lease_id).run_turn([call])
    return result.content.decode()

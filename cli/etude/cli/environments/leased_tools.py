"""Tools of a leased environment, for work that this process does in it."""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError
from typing_extensions import override

from etude.agent import messages
from etude.agent.tool_calls import ToolCall
from etude.agent.tools.base import ToolOutcome
from etude.agent.turns import RolloutEnvironment
from etude.cli.environments.client import (
    EnvironmentRequest,
    launch_environments,
    problems_of_calls,
    release_leases,
    renew_lease,
)
from etude.cli.environments.lease_store import EnvironmentLease
from etude.cli.environments.terminal import open_message
from etude.common.errors import Problem, UserError
from etude.common.rpc import channels
from etude.v1 import (
    environment_access_pb2,
    environment_access_pb2_grpc,
    environments_pb2,
    environments_pb2_grpc,
)

_TURN_S = 3600.0
"""For the calls of one turn: each tool has its own limit."""
_FILES_S = 300.0
"""For all files of a workspace."""
MAX_DIFF_BYTES = 128 << 20
"""Twice what a host reads of a workspace."""
_MAX_SAID_BYTES = 1_000
_UNPACK = ("tar", "-x", "-o", "-f", "-")


@dataclass(slots=True)
class LeasedEnvironment(RolloutEnvironment):
    """One environment, leased for this process alone."""

    environment: EnvironmentLease
    node: "environments_pb2_grpc.EnvNodeServiceAsyncStub"
    access: "environment_access_pb2_grpc.EnvAccessServiceAsyncStub"

    @override
    async def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolOutcome]:
        lease = self.environment.lease
        request = environments_pb2.RunTurnRequest(
            lease_id=lease.lease_id,
            agent_token=lease.agent_token,
            calls=[messages.to_call_message(call) for call in calls],
        )
        answer = await self.node.RunTurn(request, timeout=_TURN_S)
        return [messages.from_result_message(result) for result in answer.results]

    async def unpack(self, archive: bytes) -> None:
        """Unpack a tar archive in the workspace.

        Raises:
            UserError: the environment has no tar or no room, or is gone.
        """
        opening = open_message(self.environment, _UNPACK, timeout_seconds=int(_FILES_S))

        async def steps() -> AsyncIterator[environment_access_pb2.ExecRequest]:
            yield environment_access_pb2.ExecRequest(open=opening)
            for chunk in channels.chunks(archive):
                yield environment_access_pb2.ExecRequest(stdin=chunk)

        said, code = b"", -1
        with problems_of_calls(f"environment {self.environment.name}"):
            async for news in self.access.Exec(steps(), timeout=_FILES_S):
                said = (said + news.stderr)[:_MAX_SAID_BYTES]
                code = news.exit.exit_code if news.HasField("exit") else code
        if code:
            what = f"tar ended with {code}: {said.decode('utf-8', 'replace').strip()}"
            fix = "take a template whose image has tar and room for the files"
            where = f"environment {self.environment.name}"
            raise UserError(Problem("FailedPrecondition", what, where, fix))

    async def read_changes(self) -> environments_pb2.WorkspaceDiff:
        """Changes of the workspace since the lease began, those of unpack() included.

        Raises:
            UserError: the environment is gone, or there is more than a host reads.
        """
        lease, data = self.environment.lease, bytearray()
        request = environments_pb2.DiffRequest(
            lease_id=lease.lease_id, control_token=lease.control_token
        )
        where = f"environment {self.environment.name}"
        with problems_of_calls(where):
            async for answer in self.node.Diff(request, timeout=_FILES_S):
                if answer.too_large:
                    fix = "ignore build output in .gitignore, or raise the pool's slot.changeMib"
                    raise UserError(Problem("ChangeTooLarge", answer.too_large, where, fix))
                data += answer.chunk
                if len(data) > MAX_DIFF_BYTES:
                    break
        try:
            return environments_pb2.WorkspaceDiff.FromString(bytes(data))
        except DecodeError as error:
            fix = "try again; if it happens again, compare the versions of client and host"
            raise UserError(Problem("Corrupt", "sent no diff", where, fix)) from error


@contextlib.asynccontextmanager
async def lease_environment(
    broker: str, wish: EnvironmentRequest
) -> AsyncIterator[LeasedEnvironment]:
    """Lease an environment for as long as the block runs.

    Raises:
        UserError: none can be had.
    """
    (environment,) = await launch_environments(broker, wish)
    renewing = asyncio.create_task(renew_lease(environment), name="renew")
    try:
        async with channels.dial(environment.lease.endpoint) as channel:
            yield LeasedEnvironment(
                environment,
                environments_pb2_grpc.EnvNodeServiceStub(channel),
                environment_access_pb2_grpc.EnvAccessServiceStub(channel),
            )
    finally:
        renewing.cancel()
        await asyncio.wait([renewing])
        # Of a broker that is away, the lease ends by itself.
        with contextlib.suppress(UserError):
            await release_leases(broker, [environment.name])


@contextlib.contextmanager
def copy_workspace(workspace: str) -> Iterator[str]:
    """URI of the first files: a copy of a folder while the block runs, or the URI as it is given.

    Content behind a URI never changes, and a folder of a user does. Symbolic links are left out.

    Raises:
        UserError: there is no such folder.
    """
    if "://" in workspace:
        yield workspace
        return
    folder = Path(workspace)
    if not folder.is_dir():
        fix = "name a folder, or a URI that the pool's hosts can read"
        raise UserError(Problem("NotFound", "is not a folder", workspace, fix))
    with tempfile.TemporaryDirectory(prefix="etude-workspace-") as scratch:
        target = Path(scratch) / "files"
        shutil.copytree(folder, target, ignore=_find_special_files)
        yield target.as_uri()


def _find_special_files(parent: str, names: list[str]) -> list[str]:
    paths = [Path(parent, name) for name in names]
    return [
        each.name for each in paths if each.is_symlink() or not (each.is_file() or each.is_dir())
    ]

"""Sandboxes of API clients: owners, tokens, lifetimes."""

import asyncio
import contextlib
import hmac
import logging
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import grpc

from etude.common.errors import FullError, UnknownIdError
from etude.envserver.environment_api.api_keys import ApiCaller, UnknownKeyError
from etude.envserver.environment_api.pool_client import TTL_S, PoolClient
from etude.envserver.environment_api.sandbox_programs import SandboxPrograms
from etude.v1 import environment_state_pb2, environments_pb2

log = logging.getLogger(__name__)

MAX_LIFE_S = 86_400
TICK_S = 1.0
STATE_S = 60.0
"""To save or restore a sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRequest:
    """A client's request for a sandbox."""

    template: str
    life_s: int
    metadata: Mapping[str, str]
    env: Mapping[str, str]
    """Variables of all its programs."""
    pauses: bool = False
    """True to pause it rather than end it when its time is over."""


@dataclass(slots=True, kw_only=True, eq=False)
class ClientSandbox:
    """One sandbox."""

    name: str
    owner: str
    request: SandboxRequest
    lease: environments_pb2.Lease
    token: str
    """Token for this sandbox's files and programs."""
    tools_token: str
    """Token for this sandbox's tools, and nothing else."""
    programs: SandboxPrograms
    started_s: float = field(default_factory=time.time)
    ends_s: float = 0.0
    is_paused: bool = False

    def check_token(self, token: str) -> None:
        """Check the token of the sandbox's owner.

        Raises:
            UnknownKeyError: another token.
        """
        if not hmac.compare_digest(self.token.encode(), token.encode("utf-8", "replace")):
            raise UnknownKeyError("the sandbox's access token is missing or wrong")

    def is_tools_token(self, token: str) -> bool:
        """True if this is the token of its tools."""
        return hmac.compare_digest(self.tools_token.encode(), token.encode("utf-8", "replace"))


@dataclass(slots=True)
class ClientSandboxes:
    """All sandboxes of this process. They end with it: a lease outlives it by a minute at most."""

    pool: PoolClient
    workspace: str
    """URI of their first files."""
    most: int
    _held: dict[str, ClientSandbox] = field(default_factory=dict)
    _opening: int = 0

    async def create(
        self,
        caller: ApiCaller,
        wish: SandboxRequest,
        *,
        request_key: str = "",
    ) -> ClientSandbox:
        """Create one; the same request key again gives the same.

        Raises:
            FullError: there are too many.
        """
        if len(self._held) + self._opening >= self.most:
            raise FullError(f"{self.most} sandboxes are open here", retry_after_s=10)
        self._opening += 1
        try:
            key = f"{caller.name}/{request_key or secrets.token_hex(12)}"
            lease = await self.pool.launch(wish.template, self.workspace, key)
        finally:
            self._opening -= 1
        for held in self._held.values():
            if held.lease.lease_id == lease.lease_id and held.owner == caller.name:
                return held
        made = ClientSandbox(
            name=secrets.token_hex(10),
            owner=caller.name,
            request=wish,
            lease=lease,
            token=secrets.token_urlsafe(32),
            tools_token=secrets.token_urlsafe(32),
            programs=SandboxPrograms(self.pool.access_stub(lease), lease),
            ends_s=time.time() + wish.life_s,
        )
        self._held[made.name] = made
        return made

    def find(self, name: str) -> ClientSandbox:
        """The sandbox of this name, of any owner.

        Raises:
            UnknownIdError: it has ended, or never was.
        """
        found = self._held.get(name)
        if found is None or found.ends_s <= time.time() or not self.pool.is_alive(found.lease):
            raise UnknownIdError(f"The sandbox was not found: {name[:80]!r}")
        return found

    def find_own(self, caller: ApiCaller, name: str) -> ClientSandbox:
        """The caller's own sandbox of this name.

        Raises:
            UnknownIdError: there is none; another owner's is treated as unknown.
        """
        found = self.find(name)
        if found.owner != caller.name:
            raise UnknownIdError(f"The sandbox was not found: {name[:80]!r}")
        return found

    def list_own(self, caller: ApiCaller) -> Iterator[ClientSandbox]:
        """The caller's sandboxes, oldest first."""
        for name in list(self._held):
            with contextlib.suppress(UnknownIdError):
                yield self.find_own(caller, name)

    def extend(self, sandbox: ClientSandbox, life_s: int) -> None:
        """Set its remaining lifetime.

        Raises:
            UnknownIdError: it has ended.
        """
        self.find(sandbox.name).ends_s = time.time() + life_s

    async def pause(self, sandbox: ClientSandbox) -> None:
        """Save its files, and nothing that runs, for a day or until it is resumed."""
        request = environment_state_pb2.PauseRequest(
            lease_id=sandbox.lease.lease_id, control_token=sandbox.lease.control_token
        )
        await self.pool.state_stub(sandbox.lease).Pause(request, timeout=STATE_S)
        sandbox.is_paused, sandbox.ends_s = True, time.time() + MAX_LIFE_S

    async def resume(self, sandbox: ClientSandbox, life_s: int) -> None:
        request = environment_state_pb2.ResumeRequest(
            lease_id=sandbox.lease.lease_id,
            control_token=sandbox.lease.control_token,
            ttl_seconds=TTL_S,
        )
        await self.pool.state_stub(sandbox.lease).Resume(request, timeout=STATE_S)
        sandbox.is_paused, sandbox.ends_s = False, time.time() + life_s

    async def end(self, sandbox: ClientSandbox) -> None:
        if self._held.pop(sandbox.name, None) is not None:
            log.info("sandbox %s of %s ends", sandbox.name, sandbox.owner)
            await sandbox.programs.close()
            await self.pool.release(sandbox.lease)

    async def run(self, stop: asyncio.Event) -> None:
        """End expired sandboxes until told to stop."""
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await stop.wait()
            now_s = time.time()
            over = [
                sandbox
                for sandbox in self._held.values()
                if sandbox.ends_s <= now_s or not self.pool.is_alive(sandbox.lease)
            ]
            await asyncio.gather(*(self._expire(sandbox) for sandbox in over))

    async def _expire(self, sandbox: ClientSandbox) -> None:
        if sandbox.request.pauses and not sandbox.is_paused and self.pool.is_alive(sandbox.lease):
            try:
                await self.pause(sandbox)
            except grpc.aio.AioRpcError as error:
                log.warning("sandbox %s is not paused: %s", sandbox.name, error.details())
            else:
                return
        await self.end(sandbox)

    async def close(self) -> None:
        """End everything."""
        await asyncio.gather(*(self.end(sandbox) for sandbox in list(self._held.values())))

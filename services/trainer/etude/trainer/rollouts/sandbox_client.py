"""Sandbox client: runs one rollout's tool calls in its leased environment."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import grpc
from typing_extensions import override

from etude.agent import messages
from etude.agent.tool_calls import ToolCall
from etude.agent.tools.base import ToolOutcome
from etude.agent.turns import RolloutEnvironment
from etude.common import telemetry
from etude.common.errors import EtudeError, WrongStateError
from etude.common.rpc import channels
from etude.trainer.rollouts.outage import UNREACHABLE, OutageBudget
from etude.v1 import environments_pb2, environments_pb2_grpc

MAX_DIFF_BYTES = channels.MAX_MESSAGE_BYTES * 3 // 4
"""A rollout is scored as one message, in which its calls need room too."""

OUT_OF_REACH_S = 30.0
"""A host that the broker hears, and that does not answer here for so long, has another address."""

_T = TypeVar("_T")


class EnvironmentLostError(EtudeError):
    """The environment is gone, alone or with its host; waiting does not bring it back."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "EnvironmentLost"


class ChangeTooLargeError(WrongStateError):
    """The policy changed more than it may hand in: its own fault, never the platform's."""

    reason = "ChangeTooLarge"


class LeaseHolder(Protocol):
    """Holder of leases that learns when one is gone."""

    async def is_gone(self, lease_id: str) -> bool:
        """Ask whether a lease is gone; False while that is unknown."""
        ...

    async def wait_until_gone(self, lease_id: str) -> None:
        """Wait until it is known to be gone."""
        ...

    @property
    def is_answered(self) -> bool:
        """True if the broker answered when it was last asked."""
        ...


@dataclass(slots=True)
class SandboxClient(RolloutEnvironment):
    """Runs one rollout's tools in the environment that it leased.

    Every method raises UnavailableError when the host stayed away, and EnvironmentLostError when
    the environment is gone.
    """

    node: "environments_pb2_grpc.EnvNodeServiceAsyncStub"
    lease: environments_pb2.Lease
    holding: LeaseHolder
    outage: OutageBudget
    timeout_s: float
    known: set[str] | None = None
    """Ids of all calls in the lease, if another worker had it before: any more are a loss."""
    _unreached_since_s: float | None = field(default=None, init=False)
    """Since when the host does not answer, although the broker hears it."""

    @override
    async def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolOutcome]:
        request = environments_pb2.RunTurnRequest(
            lease_id=self.lease.lease_id,
            agent_token=self.lease.agent_token,
            calls=[messages.to_call_message(call) for call in calls],
        )
        if self.known is not None:
            self.known.update(call.call_id for call in calls)
            request.known_calls.call_ids.extend(sorted(self.known))

        async def ask() -> Sequence[ToolOutcome]:
            answer = await self.node.RunTurn(
                request, timeout=self.timeout_s, metadata=telemetry.trace_metadata()
            )
            return [messages.from_result_message(result) for result in answer.results]

        # A call that was answered already is not run again: its id gets the stored result.
        return await self._call_until_answered(ask)

    async def diff(self) -> bytes:
        """Diff of the workspace, after the end of the rollout.

        Raises:
            ChangeTooLargeError: it is larger than the pool allows, or than can be scored.
        """
        if self.known is not None:
            await self.run(())
        request = environments_pb2.DiffRequest(
            lease_id=self.lease.lease_id, control_token=self.lease.control_token
        )

        async def ask() -> bytes:
            answers = self.node.Diff(
                request, timeout=self.timeout_s, metadata=telemetry.trace_metadata()
            )
            data = bytearray()
            async for answer in answers:
                if answer.too_large:
                    raise ChangeTooLargeError(answer.too_large)
                data += answer.chunk
                if len(data) > MAX_DIFF_BYTES:
                    answers.cancel()
                    limit = f"more than {MAX_DIFF_BYTES} bytes, which can be scored"
                    raise ChangeTooLargeError(f"the change has {limit}")
            return bytes(data)

        return await self._call_until_answered(ask)

    async def _call_until_answered(self, ask: Callable[[], Coroutine[None, None, _T]]) -> _T:
        """Retry a call until it is answered or the environment is lost.

        Raises:
            AioRpcError: the host refuses the call.
        """
        while True:
            async with self.outage.count_outage(f"node {self.lease.endpoint}"):
                try:
                    answer = await self._race_lease_loss(ask())
                except grpc.aio.AioRpcError as error:
                    if await self._is_lost(error.code()):
                        raise self._lost(error.details() or "the lease is gone") from error
                    raise
                else:
                    self._unreached_since_s = None
                    return answer

    async def _race_lease_loss(self, asking: Coroutine[None, None, _T]) -> _T:
        """Await a call, or the loss of the lease: a frozen host would never end the call."""
        call = asyncio.create_task(asking, name=f"call to {self.lease.endpoint}")
        gone = asyncio.create_task(
            self.holding.wait_until_gone(self.lease.lease_id), name="lease gone"
        )
        try:
            await asyncio.wait([call, gone], return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise self._lost("its host missed its heartbeats")
            return call.result()
        finally:
            for task in (call, gone):
                task.cancel()
            await asyncio.gather(call, gone, return_exceptions=True)

    async def _is_lost(self, code: grpc.StatusCode) -> bool:
        if code is grpc.StatusCode.NOT_FOUND:
            return True
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            # Its former worker ran calls that it did not record.
            return self.known is not None
        if code not in UNREACHABLE:
            return False
        return await self.holding.is_gone(self.lease.lease_id) or self._is_out_of_reach(code)

    def _is_out_of_reach(self, code: grpc.StatusCode) -> bool:
        """True once a host that the broker hears has not answered for long.

        A host that dies is given up by its broker within seconds. One that came back elsewhere
        is heard there, with its leases, which still name its old address.
        """
        if code is not grpc.StatusCode.UNAVAILABLE or not self.holding.is_answered:
            self._unreached_since_s = None
            return False
        now_s = time.monotonic()
        if self._unreached_since_s is None:
            self._unreached_since_s = now_s
        return now_s - self._unreached_since_s > OUT_OF_REACH_S

    def _lost(self, why: str) -> EnvironmentLostError:
        return EnvironmentLostError(f"lease {self.lease.lease_id} on {self.lease.endpoint}: {why}")

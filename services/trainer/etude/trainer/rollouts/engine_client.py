"""Clients of the turn loop over gRPC: engines that sample, sandbox hosts that run tools."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import grpc
from typing_extensions import override

from etude.agent import messages
from etude.agent.completions import Completion, FinishReason
from etude.agent.tools.base import ToolOutcome
from etude.agent.trajectory import Span
from etude.agent.turns import Environment, Sampler, ToolCall
from etude.common import telemetry
from etude.common.errors import EtudeError, UnavailableError
from etude.common.rpc import channels
from etude.common.weights import VersionId
from etude.v1 import (
    environments_pb2,
    environments_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    weights_pb2,
)

RETRY_S = 0.5

MAX_DIFF_BYTES = channels.MAX_MESSAGE_BYTES * 3 // 4
"""A rollout is scored as one message, in which its calls need room too."""

_AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})

_T = TypeVar("_T")


class EnvironmentLostError(EtudeError):
    """The environment is gone, alone or with its host; waiting does not bring it back."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "EnvironmentLost"


class Holding(Protocol):
    """Holder of leases that learns when one is gone."""

    async def is_gone(self, lease_id: str) -> bool:
        """Ask whether a lease is gone; False while that is unknown."""
        ...

    async def until_gone(self, lease_id: str) -> None:
        """Wait until it is known to be gone."""
        ...


@dataclass(slots=True)
class Outage:
    """Time that a rollout lost to unreachable services, which is not the policy's fault."""

    limit_s: float
    lost_s: float = 0.0

    @asynccontextmanager
    async def waiting(self, what: str) -> AsyncIterator[None]:
        """Count the block's time if the service was unreachable; fail once too much time was lost.

        Raises:
            UnavailableError: the service stayed away.
            AioRpcError: it answered with an error that a retry does not cure.
        """
        started = time.monotonic()
        try:
            yield
        except grpc.aio.AioRpcError as error:
            if error.code() not in _AWAY:
                raise
            await self._lost(started)
            if self.lost_s > self.limit_s:
                raise UnavailableError(f"{what}: {error.details()}") from error
        except UnavailableError as error:
            await self._lost(started)
            if self.lost_s > self.limit_s:
                raise UnavailableError(f"{what}: {error}") from error

    async def _lost(self, started_s: float) -> None:
        await asyncio.sleep(RETRY_S)
        self.lost_s += time.monotonic() - started_s


@dataclass(slots=True)
class GenerateSampler(Sampler):
    """Samples one rollout's turns on the engines in rotation; moves on when one fails."""

    engine_of: "Callable[[str], inference_pb2_grpc.InferenceServiceAsyncStub]"
    targets: Sequence[str]
    rollout_id: str
    end_id: int
    outage: Outage
    timeout_s: float
    _calls: int = field(default=0)
    _chosen: int = field(default=0)

    @override
    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int | None
    ) -> Completion:
        request = inference_pb2.GenerateRequest(
            prompt_token_ids=prompt_ids,
            episode=self.rollout_id,
            sampling=inference_pb2.Sampling(
                max_tokens=max_tokens,
                temperature=temperature,
                stop_token_ids=[self.end_id],
                seed=seed,
            ),
        )
        while True:
            target = self.targets[self._chosen % len(self.targets)]
            # An engine may still know the id of a call that broke.
            self._calls += 1
            request.request_id = f"{self.rollout_id}/{self._calls}"
            async with self.outage.waiting(f"engine {target}"):
                return await self._ask(target, request)
            # The exact prefix continues anywhere.
            self._chosen += 1

    async def _ask(self, target: str, request: inference_pb2.GenerateRequest) -> Completion:
        ids: list[int] = []
        logprobs: list[float] = []
        spans: list[Span] = []
        finish = FinishReason.ABORT
        # An engine that aborts, or hangs up without a finish reason, counts as unreachable.
        async for message in self.engine_of(target).Generate(
            request, timeout=self.timeout_s, metadata=telemetry.inject()
        ):
            ids += message.token_ids
            logprobs += message.logprobs
            if message.finish_reason:
                finish = FinishReason(message.finish_reason)
                spans = [_span(span) for span in message.spans]
        if finish is FinishReason.ABORT:
            raise UnavailableError("aborted the completion")
        return Completion(ids, logprobs, spans, finish)


def _span(span: weights_pb2.PolicySpan) -> Span:
    return Span(
        span.start,
        span.end,
        VersionId.from_proto(span.sampled),
        VersionId.from_proto(span.context),
        span.replica,
    )


@dataclass(slots=True)
class LeasedEnvironment(Environment):
    """Runs one rollout's tools in the environment that it leased.

    Every method raises UnavailableError when the host stayed away, and EnvironmentLostError when
    the environment is gone.
    """

    node: "environments_pb2_grpc.EnvNodeServiceAsyncStub"
    lease: environments_pb2.Lease
    holding: Holding
    outage: Outage
    timeout_s: float

    @override
    async def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolOutcome]:
        request = environments_pb2.RunTurnRequest(
            lease_id=self.lease.lease_id,
            agent_token=self.lease.agent_token,
            calls=[messages.to_call_message(call) for call in calls],
        )

        async def ask() -> Sequence[ToolOutcome]:
            answer = await self.node.RunTurn(
                request, timeout=self.timeout_s, metadata=telemetry.inject()
            )
            return [messages.from_result_message(result) for result in answer.results]

        # A call that was answered already is not run again: its id gets the stored result.
        return await self._answered(ask)

    async def diff(self) -> bytes:
        """Diff of the workspace, after the end of the rollout; empty if it is too large.

        A policy must not hide its failure by writing more than can be scored.
        """
        request = environments_pb2.DiffRequest(
            lease_id=self.lease.lease_id, control_token=self.lease.control_token
        )

        async def ask() -> bytes:
            answers = self.node.Diff(request, timeout=self.timeout_s, metadata=telemetry.inject())
            data = bytearray()
            async for answer in answers:
                data += answer.chunk
                if len(data) > MAX_DIFF_BYTES:
                    answers.cancel()
                    return b""
            return bytes(data)

        return await self._answered(ask)

    async def _answered(self, ask: Callable[[], Coroutine[None, None, _T]]) -> _T:
        """Retry a call until it is answered or the environment is lost.

        Raises:
            AioRpcError: the host refuses the call.
        """
        while True:
            async with self.outage.waiting(f"node {self.lease.endpoint}"):
                try:
                    return await self._unless_gone(ask())
                except grpc.aio.AioRpcError as error:
                    if await self._is_lost(error.code()):
                        raise self._lost(error.details() or "the lease is gone") from error
                    raise

    async def _unless_gone(self, asking: Coroutine[None, None, _T]) -> _T:
        """Await a call, or the loss of the lease: a frozen host would never end the call."""
        call = asyncio.create_task(asking, name=f"call to {self.lease.endpoint}")
        gone = asyncio.create_task(self.holding.until_gone(self.lease.lease_id), name="lease gone")
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
        return code in _AWAY and await self.holding.is_gone(self.lease.lease_id)

    def _lost(self, why: str) -> EnvironmentLostError:
        return EnvironmentLostError(f"lease {self.lease.lease_id} on {self.lease.endpoint}: {why}")

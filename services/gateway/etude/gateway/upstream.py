"""Engines of one arm: a turn is sampled on one of them, and goes on elsewhere when that ends."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import grpc

from etude.agent.completion_draft import CompletionDraft
from etude.common.errors import InvalidFieldError, UnavailableError
from etude.common.rpc.channels import CONTROL_DEADLINE_S
from etude.gateway import metrics
from etude.gateway.turn_request import SamplingOptions
from etude.v1 import inference_pb2, inference_pb2_grpc

_GONE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)
"""Codes of an engine that is away, refuses more load, stops while it samples, or hangs."""
AVOID_S = 5.0
"""An engine that failed gets no new calls for so long, if there is another."""
PAUSE_S = 0.2
"""Before the next call, where all engines failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCall:
    """One turn to sample."""

    turn_id: str
    session: str
    """Turns of one session prefer one engine, which has their prefix in its cache."""
    prompt: Sequence[int]
    options: SamplingOptions
    message_tokens: int
    """Tokens of one message. Each tells the versions of its tokens, so that none is taken back."""
    metadata: tuple[tuple[str, str], ...] = ()
    """Trace context."""


@dataclass(slots=True)
class EngineFleet:
    """Engines that serve the same versions."""

    targets: Sequence[str]
    stub_of: "Callable[[str], inference_pb2_grpc.InferenceServiceAsyncStub]"
    outage_s: float
    """A turn fails once no engine has sampled anything for so long."""
    timeout_s: float
    """Of one call."""
    standby: Sequence[str] = ()
    """Engines of another version, asked where none of these samples."""
    lent: Collection[str] = ()
    """Those that refuse turns of users, as they are lent."""
    _failed_s: dict[str, float] = field(default_factory=dict)
    _info: inference_pb2.GetEngineInfoResponse | None = None

    async def describe(self) -> inference_pb2.GetEngineInfoResponse:
        """Describe the engines; asked for once.

        Raises:
            UnavailableError: none answers for the outage limit.
        """
        request = inference_pb2.GetEngineInfoRequest()
        # Leaves time for another one.
        deadline_s = min(CONTROL_DEADLINE_S, self.outage_s / 2)
        started_s = time.monotonic()
        while self._info is None:
            waited_s = time.monotonic() - started_s
            target = self._by_preference("", waited_s)[0]
            try:
                self._info = await self.stub_of(target).GetEngineInfo(request, timeout=deadline_s)
            except grpc.aio.AioRpcError as error:
                self._note_failure(target, error)
                if time.monotonic() - started_s > self._limit_s:
                    raise UnavailableError("no engine answers") from error
                if not self._can_replace(target):
                    await asyncio.sleep(PAUSE_S)
        return self._info

    async def sample(self, call: EngineCall, draft: CompletionDraft) -> AsyncGenerator[None, None]:
        """Sample until the draft is finished; yields whenever it has grown.

        Raises:
            InvalidFieldError: an engine refused the request.
            UnavailableError: no engine made progress for the outage limit.
        """
        progress_s = time.monotonic()
        attempt = 0
        while draft.finish is None:
            attempt += 1
            num_tokens = len(draft.token_ids)
            target = self._by_preference(call.session, time.monotonic() - progress_s)[0]
            metrics.SUBSTITUTED_CALLS.inc(target in self.standby)
            # An engine may still know the id of a call that broke.
            request_id = f"{call.turn_id}/{attempt}"
            try:
                part = self._sample_part(target, request_id, call, draft)
                async with contextlib.aclosing(part) as growth:
                    async for _ in growth:
                        progress_s = time.monotonic()
                        yield
            except grpc.aio.AioRpcError as error:
                self._note_failure(target, error)
            except TimeoutError:
                self._failed_s[target] = time.monotonic()
            finally:
                draft.end_call()
            if draft.finish is not None:
                return
            metrics.INTERRUPTED_CALLS.inc()
            if time.monotonic() - progress_s > self._limit_s:
                raise UnavailableError("no engine samples")
            if len(draft.token_ids) == num_tokens and not self._can_replace(target):
                await asyncio.sleep(PAUSE_S)

    async def _sample_part(
        self, target: str, request_id: str, call: EngineCall, draft: CompletionDraft
    ) -> AsyncGenerator[None, None]:
        """Call one engine until it ends the completion, or its own part of it.

        Raises:
            TimeoutError: it sent nothing for the outage limit.
        """
        seed = call.options.seed
        request = inference_pb2.GenerateRequest(
            request_id=request_id,
            prompt_token_ids=[*call.prompt, *draft.token_ids],
            episode=call.session,
            sampling=inference_pb2.Sampling(
                max_tokens=draft.num_left,
                temperature=call.options.temperature,
                stop_token_ids=sorted(draft.end_ids),
                # With the same seed again, a continuation would repeat the first random numbers.
                seed=None if seed is None else (seed + draft.num_kept) % (1 << 63),
            ),
            message_tokens=call.message_tokens,
        )
        answer = self.stub_of(target).Generate(
            request, timeout=self.timeout_s, metadata=call.metadata
        )
        try:
            messages = aiter(answer)
            while True:
                async with asyncio.timeout(self.outage_s):
                    message = await anext(messages, None)
                if message is None:
                    return
                draft.add(message)
                if message.token_ids:
                    self._failed_s.pop(target, None)
                    yield
        finally:
            answer.cancel()

    @property
    def _limit_s(self) -> float:
        """Longest time without progress: engines on standby have the same again."""
        return self.outage_s * (2 if self.standby else 1)

    def _by_preference(self, session: str, waited_s: float) -> list[str]:
        """Engines in the order in which a session asks them: failed ones last.

        Those on standby take over where all others failed, or none got on for the outage limit.
        Source: rendezvous hashing, https://doi.org/10.1109/90.663936.
        """
        has_failed = waited_s > self.outage_s or all(map(self._is_avoided, self.targets))
        return sorted(
            self.standby if self.standby and has_failed else self.targets,
            key=lambda target: (
                self._is_avoided(target),
                blake2b(f"{session}\0{target}".encode(), digest_size=8).digest(),
            ),
        )

    def _is_avoided(self, target: str) -> bool:
        if target in self.lent:
            return True
        failed_s = self._failed_s.get(target)
        return failed_s is not None and time.monotonic() - failed_s < AVOID_S

    def _can_replace(self, target: str) -> bool:
        """Return true if the engine is avoided from now on, and another one is not."""
        others = (*self.targets, *self.standby)
        return self._is_avoided(target) and not all(map(self._is_avoided, others))

    def _note_failure(self, target: str, error: grpc.aio.AioRpcError) -> None:
        """Let other calls avoid an engine that is away.

        Raises:
            InvalidFieldError: the engine refused the request, as any other would.
            AioRpcError: it failed otherwise.
        """
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            raise InvalidFieldError("request", error.details() or "is refused") from error
        if error.code() not in _GONE:
            raise error
        self._failed_s[target] = time.monotonic()

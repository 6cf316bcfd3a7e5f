"""Engine client: samples the turns of one rollout on the engines that the router chooses."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import grpc
from typing_extensions import override

from etude.agent.completion_draft import CompletionDraft
from etude.agent.completions import Completion
from etude.agent.token_policy import Sampler
from etude.common import telemetry
from etude.common.errors import UnavailableError
from etude.common.routed_experts import RouteDraft
from etude.trainer.rollouts.completion_counts import CompletionCounts
from etude.trainer.rollouts.outage import UNREACHABLE, Attempt, OutageBudget
from etude.trainer.routing.router import CallInFlight, Router, RoutingKey
from etude.trainer.routing.table import Purpose
from etude.trainer.seeding import derive_seed
from etude.v1 import inference_pb2, inference_pb2_grpc

MESSAGE_TOKENS = 64
"""Tokens of one message: an engine that dies takes at most so many with it, of each completion."""

GONE = UNREACHABLE | {grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED}
"""Codes of an engine that is away, refuses more load, or stops while it samples."""


@dataclass(slots=True)
class EngineSampler(Sampler):
    """Samples one rollout's turns; goes on elsewhere from the exact prefix when an engine ends."""

    engine_of: "Callable[[str], inference_pb2_grpc.InferenceServiceAsyncStub]"
    router: Router
    group_id: str
    rollout_id: str
    end_ids: AbstractSet[int]
    """Tokens that end a turn."""
    outage: OutageBudget
    timeout_s: float
    attempt: str = ""
    """Part of the ids of its calls: an engine may still run those of a worker that died."""
    purpose: Purpose = Purpose.TRAINING
    counts: CompletionCounts = field(default_factory=CompletionCounts)
    records_routes: bool = False
    """True if engines are asked for the experts of tokens."""
    _context: list[int] = field(default_factory=list)
    """Tokens up to the end of the last completion, if experts are asked for."""
    _num_routed: int = field(default=0)
    """Of these, tokens whose experts were sent."""
    _calls: int = field(default=0)
    _engine: str = field(default="")
    _engine_tokens: int = field(default=0)

    @override
    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int | None
    ) -> Completion:
        draft = CompletionDraft(max_tokens, self.end_ids, prompt_tokens=len(prompt_ids))
        if self.records_routes:
            draft.routes = RouteDraft(self._first_unrouted(prompt_ids))
        while draft.finish is None:
            request = inference_pb2.GenerateRequest(
                prompt_token_ids=[*prompt_ids, *draft.token_ids],
                episode=self.rollout_id,
                sampling=inference_pb2.Sampling(
                    max_tokens=draft.num_left,
                    temperature=temperature,
                    stop_token_ids=sorted(self.end_ids),
                    seed=_call_seed(seed, draft),
                ),
                message_tokens=MESSAGE_TOKENS,
                is_rollout=True,
                routes_from=None if draft.routes is None else draft.routes.end,
            )
            async with self.router.token_slots.hold(self.outage.add_wait):
                await self._sample_part(request, draft)
        num_tokens = len(draft.token_ids)
        self.counts.add(num_tokens, is_interrupted=draft.num_calls > 1)
        self.router.note_completion(num_tokens)
        if draft.routes is not None:
            self._context = [*prompt_ids, *draft.token_ids]
            self._num_routed = draft.routes.end
        return draft.completion()

    def _first_unrouted(self, prompt_ids: Sequence[int]) -> int:
        """Position of the first token whose experts were not sent before.

        A context that does not go on from the last completion is a new one.
        """
        goes_on = list(prompt_ids[: len(self._context)]) == self._context
        return self._num_routed if goes_on else 0

    async def _sample_part(
        self, request: inference_pb2.GenerateRequest, draft: CompletionDraft
    ) -> None:
        """Call one engine; what it sampled before it ended stays in the draft.

        Raises:
            UnavailableError: no engine made progress for the limit of the outage budget.
            AioRpcError: the engine refused the request.
        """
        key = self._next_key(len(request.prompt_token_ids))
        # An engine may still know the id of a call that broke.
        request.request_id = f"{self.rollout_id}/{self.attempt}{key.call}"
        choice = self.router.choose(key)
        if choice is None:
            async with self.outage.count_outage("engines"):
                raise UnavailableError("none takes calls")
            return
        outage = self.outage.count_outage(
            f"engine {choice.target}",
            codes=GONE,
            has_substitute=not choice.is_suspect,
        )
        async with outage as attempt:
            try:
                with self.router.track(choice.target, key) as load:
                    await self._read(choice.target, request, draft, attempt, load)
            except (grpc.aio.AioRpcError, UnavailableError) as error:
                self._note_failure(choice.target, error, attempt)
                raise
            finally:
                draft.end_call()

    def _next_key(self, prompt_tokens: int) -> RoutingKey:
        self._calls += 1
        return RoutingKey(
            group_id=self.group_id,
            rollout_id=self.rollout_id,
            call=self._calls,
            prompt_tokens=prompt_tokens,
            purpose=self.purpose,
            engine=self._engine,
            engine_tokens=self._engine_tokens,
        )

    async def _read(
        self,
        target: str,
        request: inference_pb2.GenerateRequest,
        draft: CompletionDraft,
        attempt: Attempt,
        load: CallInFlight,
    ) -> None:
        """Read the messages of one call, up to the end of the completion or of the engine's stay.

        Raises:
            UnavailableError: the engine ended the call without a finish reason.
        """
        call = self.engine_of(target).Generate(
            request, timeout=self.timeout_s, metadata=telemetry.trace_metadata()
        )
        try:
            async for message in call:
                draft.add(message)
                load.add_tokens(len(message.token_ids))
                if message.token_ids:
                    attempt.note_progress()
                    self.router.note_success(target)
                    self._engine, self._engine_tokens = target, load.tokens
                if draft.finish is None and self.router.is_leaving(target):
                    return
        finally:
            call.cancel()
        if draft.finish is None:
            raise UnavailableError("aborted the completion")

    def _note_failure(self, target: str, error: Exception, attempt: Attempt) -> None:
        """Let other calls avoid an engine that is away; one that aborts for a swap is not."""
        is_away = isinstance(error, grpc.aio.AioRpcError) and error.code() in GONE
        if is_away or (isinstance(error, UnavailableError) and not attempt.has_progress):
            self.router.note_failure(target)


def _call_seed(seed: int | None, draft: CompletionDraft) -> int | None:
    """Seed of the next call: the completion's own until tokens are kept, then one derived.

    With its own seed again, a continuation would repeat the random numbers of its beginning.
    """
    if seed is None or not draft.num_kept:
        return seed
    return derive_seed(seed, "continued", draft.num_kept)

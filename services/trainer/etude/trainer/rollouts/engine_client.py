"""Engine client: samples the turns of one rollout on the engines in rotation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from etude.agent.completions import Completion, FinishReason
from etude.agent.trajectory import PolicySpan
from etude.agent.turns import Sampler
from etude.common import telemetry
from etude.common.errors import UnavailableError
from etude.common.weights import VersionId
from etude.trainer.rollouts.outage import OutageBudget
from etude.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    weights_pb2,
)


@dataclass(slots=True)
class EngineSampler(Sampler):
    """Samples one rollout's turns on the engines in rotation; moves on when one fails."""

    engine_of: "Callable[[str], inference_pb2_grpc.InferenceServiceAsyncStub]"
    targets: Sequence[str]
    rollout_id: str
    end_id: int
    outage: OutageBudget
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
            async with self.outage.count_outage(f"engine {target}"):
                return await self._ask(target, request)
            # The exact prefix continues anywhere.
            self._chosen += 1

    async def _ask(self, target: str, request: inference_pb2.GenerateRequest) -> Completion:
        ids: list[int] = []
        logprobs: list[float] = []
        spans: list[PolicySpan] = []
        finish = FinishReason.ABORT
        # An engine that aborts, or hangs up without a finish reason, counts as unreachable.
        async for message in self.engine_of(target).Generate(
            request, timeout=self.timeout_s, metadata=telemetry.trace_metadata()
        ):
            ids += message.token_ids
            logprobs += message.logprobs
            if message.finish_reason:
                finish = FinishReason(message.finish_reason)
                spans = [_read_span(span) for span in message.spans]
        if finish is FinishReason.ABORT:
            raise UnavailableError("aborted the completion")
        return Completion(ids, logprobs, spans, finish)


def _read_span(span: weights_pb2.PolicySpan) -> PolicySpan:
    return PolicySpan(
        span.start,
        span.end,
        VersionId.from_proto(span.sampled),
        VersionId.from_proto(span.context),
        span.replica,
    )

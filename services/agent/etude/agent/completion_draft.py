"""Completion under construction: tokens of one or several calls, joined with their spans. Pure."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from etude.agent.completions import Completion, FinishReason
from etude.agent.trajectory import PolicySpan
from etude.common.weights import VersionId
from etude.v1 import inference_pb2, weights_pb2

_FINISHED = {
    inference_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


@dataclass(slots=True)
class CompletionDraft:
    """Tokens of a completion so far; a call that breaks leaves those that have a version."""

    max_tokens: int
    end_ids: AbstractSet[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[PolicySpan] = field(default_factory=list)
    finish: FinishReason | None = None
    num_calls: int = 0
    """Calls that sampled any of the tokens."""
    run_uids: set[str] = field(default_factory=set)
    """Runs whose versions sampled them, as far as engines name these."""
    _offset: int = 0
    """Tokens of earlier calls."""
    _span_offset: int = 0
    """Spans of earlier calls."""

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.max_tokens - len(self.token_ids)

    def add(self, message: inference_pb2.GenerateResponse) -> None:
        """Append a message of the present call."""
        self.token_ids += message.token_ids
        self.logprobs += message.logprobs
        if message.run_uid:
            self.run_uids.add(message.run_uid)
        if message.spans:
            spans = [_read_span(span, self._offset) for span in message.spans]
            self.spans[self._span_offset :] = spans
        if message.finish_reason in _FINISHED:
            self.finish = _FINISHED[message.finish_reason]

    def end_call(self) -> None:
        """End the present call: without a finish reason, keep the tokens that have a version.

        A completion that needs no further token is finished.
        """
        if self.finish is None:
            self._drop_unlabelled()
            if self.token_ids and self.token_ids[-1] in self.end_ids:
                self.finish = FinishReason.STOP
            elif not self.num_left:
                self.finish = FinishReason.LENGTH
        self.num_calls += len(self.token_ids) > self._offset
        self._offset, self._span_offset = len(self.token_ids), len(self.spans)

    @property
    def num_kept(self) -> int:
        """Tokens that calls before the present one sampled."""
        return self._offset

    def completion(self) -> Completion:
        """The finished completion.

        Raises:
            ValueError: it is not finished.
        """
        if self.finish is None:
            raise ValueError("the completion is not finished")
        return Completion(self.token_ids, self.logprobs, self.spans, self.finish)

    def _drop_unlabelled(self) -> None:
        """Drop tokens without a log-probability, or without a span that joins those before."""
        num_tokens = min(len(self.token_ids), len(self.logprobs))
        position, num_spans = self._offset, self._span_offset
        for span in self.spans[self._span_offset :]:
            if span.start != position or not span.start < span.end <= num_tokens:
                break
            position, num_spans = span.end, num_spans + 1
        del self.token_ids[position:], self.logprobs[position:], self.spans[num_spans:]


def _read_span(span: weights_pb2.PolicySpan, offset: int) -> PolicySpan:
    return PolicySpan(
        span.start + offset,
        span.end + offset,
        VersionId.from_proto(span.sampled),
        VersionId.from_proto(span.context),
        span.replica,
    )

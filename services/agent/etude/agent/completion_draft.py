"""Completion under construction: tokens of one or several calls, joined with their spans. Pure."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from etude.agent.completions import Completion, FinishReason
from etude.agent.trajectory import PolicySpan
from etude.common.errors import InvalidFieldError
from etude.common.routed_experts import RouteDraft, RouteRows
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
    prompt_tokens: int = 0
    """Of the context before the completion."""
    routes: RouteDraft | None = None
    """Experts of tokens of the context, if engines are asked for them."""
    _offset: int = 0
    """Tokens of earlier calls."""
    _span_offset: int = 0
    """Spans of earlier calls."""

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.max_tokens - len(self.token_ids)

    def add(self, message: inference_pb2.GenerateResponse) -> None:
        """Append a message of the present call.

        Raises:
            InvalidFieldError: its experts are invalid.
        """
        self.token_ids += message.token_ids
        self.logprobs += message.logprobs
        if self.routes is not None and message.HasField("routes"):
            self._add_routes(self.routes, RouteRows.read(message.routes))
        if message.run_uid:
            self.run_uids.add(message.run_uid)
        if message.spans:
            spans = [_read_span(span, self._offset) for span in message.spans]
            self.spans[self._span_offset :] = spans
        if message.finish_reason in _FINISHED:
            self.finish = _FINISHED[message.finish_reason]

    def _add_routes(self, draft: RouteDraft, rows: RouteRows) -> None:
        """Add rows of experts, which the call sends from where it was asked to, without gaps.

        Raises:
            InvalidFieldError: they begin elsewhere, or are of more tokens than there can be.
        """
        most = self.prompt_tokens + self.max_tokens
        if rows.start != draft.end:
            raise InvalidFieldError("routes.start", f"{rows.start} where {draft.end} was due")
        if rows.end > most:
            raise InvalidFieldError("routes.ids", f"rows up to {rows.end} of {most} tokens")
        draft.add(rows)

    def end_call(self) -> None:
        """End the present call: without a finish reason, keep the tokens that have a version.

        A completion that needs no further token is finished.
        """
        if self.finish is None:
            self._drop_unlabelled()
            if self.routes is not None:
                self.routes.cut(self.prompt_tokens + len(self.token_ids))
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
        rows = None if self.routes is None else self.routes.rows()
        return Completion(self.token_ids, self.logprobs, self.spans, self.finish, rows)

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

"""Completions of several calls: tokens without a version are dropped, spans are shifted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.completion_draft import CompletionDraft
from etude.agent.completions import FinishReason, find_inconsistency
from etude.v1.inference_pb2 import GenerateResponse
from etude.v1.weights_pb2 import PolicySpan, PolicyVersion

VERSION = PolicyVersion(epoch=1, number=2)
END = 9


def span(start: int, end: int) -> PolicySpan:
    return PolicySpan(start=start, end=end, sampled=VERSION, context=VERSION)


def message(
    ids: list[int], *spans: PolicySpan, finish: FinishReason | None = None
) -> GenerateResponse:
    logprobs = [-1.0] * len(ids)
    return GenerateResponse(
        token_ids=ids,
        logprobs=logprobs,
        spans=spans,
        finish_reason=f"FINISH_REASON_{finish.name}" if finish else None,
    )


def test_tokens_that_have_a_span_survive_a_broken_call() -> None:
    draft = CompletionDraft(10, {END})
    draft.add(message([1, 2], span(0, 2)))
    draft.add(message([3, 4]))
    draft.end_call()
    assert (draft.token_ids, draft.logprobs, draft.num_left) == ([1, 2], [-1.0, -1.0], 8)
    draft.add(message([5], span(0, 1)))
    draft.add(message([END], span(0, 2), finish=FinishReason.STOP))
    draft.end_call()
    done = draft.completion()
    assert done.token_ids == [1, 2, 5, END]
    assert [(each.start, each.end) for each in done.spans] == [(0, 2), (2, 4)]


@pytest.mark.parametrize("spans", [[span(1, 2)], [span(0, 3)], [span(0, 0)], [span(2, 1)]])
def test_spans_of_a_broken_call_that_do_not_fit_keep_nothing(spans: list[PolicySpan]) -> None:
    draft = CompletionDraft(10, {END})
    draft.add(message([1, 2], *spans))
    draft.end_call()
    assert (draft.token_ids, draft.spans) == ([], [])


def test_a_broken_call_that_had_sampled_everything_is_finished() -> None:
    for ids, limit, finish in (
        ([1, END], 9, FinishReason.STOP),
        ([1, 2], 2, FinishReason.LENGTH),
    ):
        draft = CompletionDraft(limit, {END})
        draft.add(message(ids, span(0, 2)))
        draft.end_call()
        assert draft.completion().finish is finish


def test_tokens_of_the_present_call_are_not_kept_yet() -> None:
    draft = CompletionDraft(10, {END})
    draft.add(message([1], span(0, 1)))
    assert draft.num_kept == 0
    draft.end_call()
    assert draft.num_kept == 1


@given(st.lists(st.lists(st.integers(1, 8), max_size=5), min_size=1, max_size=6))
def test_any_sequence_of_broken_calls_joins_to_a_consistent_completion(
    parts: list[list[int]],
) -> None:
    sampled = [token for part in parts for token in part]
    draft = CompletionDraft(len(sampled) + 1, {END})
    for part in parts:
        draft.add(message(part, *([span(0, len(part))] if part else [])))
        draft.end_call()
    draft.add(message([END], span(0, 1), finish=FinishReason.STOP))
    draft.end_call()
    done = draft.completion()
    assert done.token_ids == [*sampled, END]
    limit = len(sampled) + 1
    assert find_inconsistency(done, max_tokens=limit, vocab_size=10, end_ids={END}) == ""

"""Spans say which weights made which tokens, without gaps."""

import pytest

from etude.common.weights import VersionId
from etude.inference.engine.interface import LabelSpan
from etude.inference.serving.messages import policy_spans


def test_a_swap_in_the_middle_gives_two_touching_spans() -> None:
    labels = [LabelSpan("1.3", 0, 5), LabelSpan("1.4", 5, 9)]
    first, second = policy_spans(labels, admitted=VersionId(1, 3), num_tokens=9)
    assert (first.start, first.end, second.start, second.end) == (0, 5, 5, 9)
    assert VersionId.from_proto(first.sampled) == VersionId(1, 3)
    assert VersionId.from_proto(second.sampled) == VersionId(1, 4)


def test_tokens_after_a_swap_attended_to_the_version_of_admission() -> None:
    [span] = policy_spans([LabelSpan("1.4", 0, 2)], admitted=VersionId(1, 3), num_tokens=2)
    assert VersionId.from_proto(span.context) == VersionId(1, 3)


def test_the_context_is_never_newer_than_the_sampled_version() -> None:
    # A roll-back: admitted under 1.7, sampled under the older 2.5 of a new line.
    [span] = policy_spans([LabelSpan("2.5", 0, 2)], admitted=VersionId(1, 7), num_tokens=2)
    assert VersionId.from_proto(span.context) == VersionId(2, 5)


def test_the_oldest_entries_stay_until_a_request_ends() -> None:
    labels = [LabelSpan("2.5", 0, 2), LabelSpan("2.8", 2, 4)]
    _, last = policy_spans(labels, admitted=VersionId(1, 7), num_tokens=4)
    assert VersionId.from_proto(last.context) == VersionId(2, 5)


def test_recomputed_entries_are_of_the_version_that_samples() -> None:
    labels = [LabelSpan("1.4", 0, 2), LabelSpan("1.5", 2, 4)]
    spans = policy_spans(labels, admitted=VersionId(1, 3), num_tokens=4, recomputes=True)
    assert [span.context for span in spans] == [span.sampled for span in spans]


def test_no_tokens_have_no_spans() -> None:
    assert policy_spans([], admitted=VersionId(1, 0), num_tokens=0) == []


@pytest.mark.parametrize(
    "labels",
    [
        [],
        [LabelSpan("1.0", 0, 2)],
        [LabelSpan("1.0", 1, 3)],
        [LabelSpan("1.0", 0, 4)],
        [LabelSpan("1.0", 0, 1), LabelSpan("1.1", 2, 3)],
        [LabelSpan("1.0", 0, 2), LabelSpan("1.1", 1, 3)],
        [LabelSpan("1.0", 0, 0), LabelSpan("1.1", 0, 3)],
        [LabelSpan("default", 0, 3)],
    ],
)
def test_labels_that_do_not_cover_the_completion_are_refused(labels: list[LabelSpan]) -> None:
    with pytest.raises(ValueError, match=r"do not cover|no policy version"):
        policy_spans(labels, admitted=VersionId(1, 0), num_tokens=3)

"""Records of turns as token sequences: joined by branch, masked where the policy did not sample."""

from collections.abc import Callable, Mapping

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tests.support.feedback.turns import turn

from etude.common.weights import VersionId
from etude.feedback.windows.assembly import UntrainableError, assemble_rollout
from etude.v1 import rollout_pb2, turns_pb2

Part = tuple[list[int], list[int]]
"""Tokens read, then tokens sampled."""
TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=4)
PARTS = st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=5)


def records(parts: list[Part], lost: set[int], branch: str = "b") -> list[turns_pb2.TurnRecord]:
    """Turns of one branch as the gateway records them; some records are lost before it knows."""
    tokens: list[int] = []
    recorded = 0
    found: list[turns_pb2.TurnRecord] = []
    for number, (read, sampled) in enumerate(parts):
        tokens += read
        record = turn(
            "u",
            started_ms=number,
            branch=branch,
            prefix=recorded,
            prompt=tokens[recorded:],
            sampled=sampled,
        )
        tokens += sampled
        if number in lost:
            recorded = 0
        else:
            found.append(record)
            recorded = len(tokens)
    return found


def trained(link: rollout_pb2.Link) -> list[int]:
    return [token for token, mask in zip(link.token_ids, link.loss_mask, strict=True) if mask]


@given(parts=PARTS, lost=st.sets(st.integers(0, 4)))
def test_a_branch_is_its_tokens_and_trains_what_its_records_sampled(
    parts: list[Part], lost: set[int]
) -> None:
    turns = records(parts, lost)
    if not turns:
        return
    (link,) = assemble_rollout("r", turns).links
    last = max(number for number in range(len(parts)) if number not in lost)
    assert list(link.token_ids) == [t for part in parts[: last + 1] for ids in part for t in ids]
    kept = [part for number, part in enumerate(parts) if number not in lost]
    assert trained(link) == [token for _, sampled in kept for token in sampled]
    assert [p for p, m in zip(link.sampler_logprobs, link.loss_mask, strict=True) if m] == [
        -0.5
    ] * sum(link.loss_mask)
    covered = [place for span in link.spans for place in range(span.start, span.end)]
    assert covered == [place for place, mask in enumerate(link.loss_mask) if mask]


def test_a_branch_that_was_split_off_trains_its_own_turns_alone() -> None:
    first = turn("u", started_ms=1, prompt=[1, 2], sampled=[3])
    second = turn("u", started_ms=2, branch="c", prompt=[1, 2, 3, 4], sampled=[5])
    rollout = assemble_rollout("r", [first, second])
    assert [trained(link) for link in rollout.links] == [[3], [5]]
    assert list(rollout.links[1].token_ids) == [1, 2, 3, 4, 5]
    assert (rollout.costs.turns, rollout.costs.completion_tokens) == (2, 2)


def test_side_turns_stay_out_of_the_loss() -> None:
    main = turn("u", started_ms=1, prompt=[1], sampled=[2])
    side = turn("u", started_ms=2, branch="c", prompt=[1, 2, 3], sampled=[4], is_side=True)
    (link,) = assemble_rollout("r", [main, side]).links
    assert trained(link) == [2]
    with pytest.raises(UntrainableError) as error:
        assemble_rollout("r", [side])
    assert error.value.mask == "OnlySideTurns"


@given(parts=PARTS, withheld=st.integers(0, 4))
def test_a_branch_ends_before_the_first_turn_whose_tokens_are_withheld(
    parts: list[Part], withheld: int
) -> None:
    turns = records(parts, set())
    clean = assemble_rollout("r", turns[:withheld]) if withheld else None
    for each in turns[withheld:]:
        each.withheld.num_tokens = len(each.token_ids)
        for name in ("prompt_token_ids", "token_ids", "logprobs"):
            each.ClearField(name)
    if clean is None:
        with pytest.raises(UntrainableError):
            assemble_rollout("r", turns)
    else:
        assert assemble_rollout("r", turns) == clean


def test_two_versions_in_one_turn_are_two_spans() -> None:
    record = turn("u", started_ms=1, prompt=[1, 2], sampled=[3, 4, 5])
    record.spans[0].end = 2
    record.spans.add(start=2, end=3).sampled.CopyFrom(VersionId(1, 2).to_proto())
    (link,) = assemble_rollout("r", [record]).links
    assert [(s.start, s.end, s.sampled.number) for s in link.spans] == [(2, 4, 1), (4, 5, 2)]


def two_turns() -> list[turns_pb2.TurnRecord]:
    record = turn("u", started_ms=1, prompt=[1, 2], sampled=[3, 4])
    return [record, turn("u", started_ms=2, prefix=4, prompt=[5], sampled=[6])]


def empty_span(first: turns_pb2.TurnRecord) -> None:
    first.spans.add(start=2, end=2)


def clear_prompt(first: turns_pb2.TurnRecord) -> None:
    first.ClearField("prompt_token_ids")


def clear_completion(first: turns_pb2.TurnRecord) -> None:
    first.ClearField("token_ids")
    first.ClearField("logprobs")


BREAKS: Mapping[str, Callable[[turns_pb2.TurnRecord], object]] = {
    "fewer log-probabilities": lambda first: first.logprobs.pop(),
    "a span that ends early": lambda first: setattr(first.spans[0], "end", 1),
    "no span": lambda first: first.spans.pop(),
    "an empty span": empty_span,
    "nothing sampled": clear_completion,
    "nothing read": clear_prompt,
    "a negative token": lambda first: first.token_ids.__setitem__(0, -1),
}


@pytest.mark.parametrize("name", BREAKS)
def test_an_inconsistent_record_masks_the_rollout(name: str) -> None:
    turns = two_turns()
    assert assemble_rollout("r", turns).links
    BREAKS[name](turns[0])
    with pytest.raises(UntrainableError) as error:
        assemble_rollout("r", turns)
    assert error.value.mask == "MalformedTurns"


def test_a_record_that_repeats_other_tokens_masks_the_rollout() -> None:
    turns = two_turns()
    turns[1].num_prefix_tokens = 3
    with pytest.raises(UntrainableError) as error:
        assemble_rollout("r", turns)
    assert error.value.mask == "MalformedTurns"


def test_a_missing_record_masks_the_rollout() -> None:
    with pytest.raises(UntrainableError) as error:
        assemble_rollout("r", two_turns()[1:])
    assert error.value.mask == "IncompleteTurns"

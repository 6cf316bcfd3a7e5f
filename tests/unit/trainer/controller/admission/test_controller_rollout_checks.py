"""Spans are believed only if they can be true, judged token by token."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.common.weights import VersionId
from etude.trainer.contents.rollout_checks import InvalidSpanError, check_spans
from etude.v1.rollout_pb2 import Link, Rollout
from etude.v1.weights_pb2 import PolicySpan, PolicyVersion

VERSIONS = [VersionId(1, 3), VersionId(1, 4), VersionId(2, 6), VersionId(3, 9)]
KNOWN = {version: position for position, version in enumerate(VERSIONS)}
UNKNOWN = VersionId(3, 8)


def is_sound(rollout: Rollout) -> bool:
    """The contract, told by asking each token who made it."""
    contexts = []
    for link in rollout.links:
        owners: list[list[PolicySpan]] = [[] for _ in link.token_ids]
        for span in link.spans:
            if span.start >= span.end or span.end > len(owners):
                return False
            for token in range(span.start, span.end):
                owners[token].append(span)
            pair = [VersionId.from_proto(span.context), VersionId.from_proto(span.sampled)]
            if any(version not in KNOWN for version in pair) or pair[0].number > pair[1].number:
                return False
            contexts.append(pair[0])
        if [len(owner) for owner in owners] != list(link.loss_mask):
            return False
        starts = [span.start for span in link.spans]
        if starts != sorted(starts):
            return False
    oldest = VersionId.from_proto(rollout.oldest)
    return oldest in KNOWN and all(oldest.number <= context.number for context in contexts)


def accepts(rollout: Rollout) -> bool:
    try:
        check_spans(rollout, position_of=KNOWN.get)
    except InvalidSpanError:
        return False
    return True


@st.composite
def sound_rollouts(draw: st.DrawFn) -> Rollout:
    rollout = Rollout(oldest=VERSIONS[0].to_proto())
    for _ in range(draw(st.integers(1, 2))):
        mask = draw(st.lists(st.booleans(), min_size=1, max_size=12))
        link = Link(token_ids=[1] * len(mask), loss_mask=bytes(mask))
        place = 0
        for is_sampled, run in itertools.groupby(mask):
            end = place + sum(1 for _ in run)
            while is_sampled and place < end:
                cut = draw(st.integers(place + 1, end))
                versions = sorted(draw(st.tuples(*[st.sampled_from(VERSIONS)] * 2)))
                link.spans.append(
                    PolicySpan(
                        start=place,
                        end=cut,
                        context=versions[0].to_proto(),
                        sampled=versions[1].to_proto(),
                    )
                )
                place = cut
            place = end
        rollout.links.append(link)
    return rollout


@given(sound_rollouts())
def test_spans_that_cover_exactly_what_was_sampled_are_believed(rollout: Rollout) -> None:
    assert is_sound(rollout)
    check_spans(rollout, position_of=KNOWN.get)


@settings(max_examples=400)
@given(sound_rollouts(), st.randoms(use_true_random=False))
def test_what_any_change_leaves_is_believed_only_if_each_token_agrees(
    rollout: Rollout, draw: random.Random
) -> None:
    for _ in range(draw.randint(1, 2)):
        change(rollout, draw)
    assert accepts(rollout) == is_sound(rollout)


def change(rollout: Rollout, draw: random.Random) -> None:
    link = draw.choice(list(rollout.links))
    kind = draw.choice(["bound", "version", "drop", "repeat", "swap", "mask", "oldest"])
    version = draw.choice([*VERSIONS, UNKNOWN]).to_proto()
    if kind == "oldest":
        rollout.oldest.CopyFrom(version)
    elif kind == "mask":
        mask = bytearray(link.loss_mask)
        mask[draw.randrange(len(mask))] ^= 1
        link.loss_mask = bytes(mask)
    elif link.spans:
        place = draw.randrange(len(link.spans))
        span = link.spans[place]
        if kind == "bound":
            name = draw.choice(["start", "end"])
            setattr(span, name, max(0, getattr(span, name) + draw.choice([-1, 1])))
        elif kind == "version":
            getattr(span, draw.choice(["sampled", "context"])).CopyFrom(version)
        elif kind == "drop":
            del link.spans[place]
        elif kind == "repeat":
            link.spans.insert(place, span)
        else:
            spans = list(link.spans)
            del link.spans[:]
            link.spans.extend(draw.sample(spans, len(spans)))


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([(1, 2)], "do not cover the token 2"),
        ([(2, 3)], "does not start at 1"),
        ([(1, 3), (2, 3)], "does not start at 5"),
        ([(1, 5)], "were not sampled"),
        ([(1, 1)], "does not start at 1"),
        ([(1, 3), (5, 9)], "does not start at 5"),
    ],
)
def test_a_refusal_says_which_tokens_are_wrong(spans: list[tuple[int, int]], words: str) -> None:
    version = PolicyVersion(epoch=1, number=4)
    link = Link(
        token_ids=[1] * 6,
        loss_mask=bytes([0, 1, 1, 0, 0, 1]),
        spans=[PolicySpan(sampled=version, context=version, start=a, end=b) for a, b in spans],
    )
    with pytest.raises(InvalidSpanError, match=words) as caught:
        check_spans(Rollout(links=[link], oldest=version), position_of=KNOWN.get)
    assert (caught.value.reason, caught.value.field) == ("InvalidSpan", "links[0].spans")

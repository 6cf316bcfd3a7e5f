"""Malformed trajectories: each of 500 seeded ones is refused, and the refusal names its field."""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping

import pytest

from etude.common.errors import InvalidFieldError
from etude.common.weights import VersionId
from etude.trainer.contents.rollout_checks import check_rollout
from etude.trainer.controller.admission.groups import check_reward
from etude.v1.journal_pb2 import JournalRollout
from etude.v1.rewards_pb2 import RewardRecord
from etude.v1.rollout_pb2 import Link, Rollout
from etude.v1.weights_pb2 import PolicySpan, PolicyVersion

CASES = 500
VOCABULARY = 97
MAX_TOKENS = 1 << 20
KNOWN = {VersionId(1, number): number for number in range(3, 7)}

Damage = Callable[[random.Random, JournalRollout, int], str]
"""Damages one link of a sound record, by its place; returns the field that a refusal must name."""


def version(number: int, epoch: int = 1) -> PolicyVersion:
    return PolicyVersion(epoch=epoch, number=number)


def sound_link(draw: random.Random) -> Link:
    """A link with one to three stretches of sampled tokens, and one or two spans for each."""
    mask: list[int] = []
    spans: list[PolicySpan] = []
    for _ in range(draw.randint(1, 3)):
        mask += [0] * draw.randint(1, 6)
        start, size = len(mask), draw.randint(2, 8)
        mask += [1] * size
        cut = start + draw.randint(1, size - 1)
        for first, end in ((start, cut), (cut, start + size)):
            context = draw.randint(3, 5)
            sampled = draw.randint(context, 6)
            spans.append(
                PolicySpan(sampled=version(sampled), context=version(context), start=first, end=end)
            )
    return Link(
        token_ids=[draw.randrange(VOCABULARY) for _ in mask],
        loss_mask=bytes(mask),
        sampler_logprobs=[-draw.random() for _ in mask],
        spans=spans,
    )


def sound_record(draw: random.Random) -> JournalRollout:
    rollout = Rollout(
        rollout_id=f"g-{draw.getrandbits(32)}",
        group_id="g",
        links=[sound_link(draw) for _ in range(draw.randint(1, 4))],
        oldest=version(3),
        newest=version(6),
    )
    return JournalRollout(rollout=rollout, reward=RewardRecord(reward=draw.uniform(-1, 1)))


def check(record: JournalRollout) -> None:
    check_reward(record)
    check_rollout(
        record.rollout, vocab_size=VOCABULARY, max_tokens=MAX_TOKENS, position_of=KNOWN.get
    )


def shorten_mask(draw: random.Random, record: JournalRollout, at: int) -> str:
    link = record.rollout.links[at]
    link.loss_mask = link.loss_mask[: draw.randrange(len(link.loss_mask))]
    return f"links[{at}]"


def lengthen_logprobs(draw: random.Random, record: JournalRollout, at: int) -> str:
    record.rollout.links[at].sampler_logprobs.extend([-1.0] * draw.randint(1, 9))
    return f"links[{at}]"


def shorten_tokens(draw: random.Random, record: JournalRollout, at: int) -> str:
    link = record.rollout.links[at]
    del link.token_ids[draw.randint(1, len(link.token_ids) - 1) :]
    return f"links[{at}]"


def exceed_vocabulary(draw: random.Random, record: JournalRollout, at: int) -> str:
    ids = record.rollout.links[at].token_ids
    ids[draw.randrange(len(ids))] = draw.choice([VOCABULARY, VOCABULARY + 1, (1 << 31) - 1])
    return f"links[{at}].token_ids"


def give_negative_id(draw: random.Random, record: JournalRollout, at: int) -> str:
    ids = record.rollout.links[at].token_ids
    ids[draw.randrange(len(ids))] = draw.choice([-1, -(1 << 31)])
    return f"links[{at}].token_ids"


def remove_tokens(_draw: random.Random, record: JournalRollout, at: int) -> str:
    record.rollout.links[at].Clear()
    return f"links[{at}].token_ids"


def remove_links(_draw: random.Random, record: JournalRollout, _at: int) -> str:
    del record.rollout.links[:]
    return "links"


def exceed_a_million_tokens(draw: random.Random, record: JournalRollout, at: int) -> str:
    count = MAX_TOKENS + draw.randint(1, 9)
    record.rollout.links[at].token_ids.extend([1] * count)
    return f"links[{at}].token_ids"


def sample_the_first_token(_draw: random.Random, record: JournalRollout, at: int) -> str:
    link = record.rollout.links[at]
    link.loss_mask = b"\x01" + link.loss_mask[1:]
    return f"links[{at}].loss_mask"


def give_other_mask_byte(draw: random.Random, record: JournalRollout, at: int) -> str:
    mask = bytearray(record.rollout.links[at].loss_mask)
    mask[draw.randrange(1, len(mask))] = draw.randint(2, 255)
    record.rollout.links[at].loss_mask = bytes(mask)
    return f"links[{at}].loss_mask"


def overlap_spans(_draw: random.Random, record: JournalRollout, at: int) -> str:
    spans = record.rollout.links[at].spans
    spans[1].start = spans[0].start
    return f"links[{at}].spans"


def swap_spans(_draw: random.Random, record: JournalRollout, at: int) -> str:
    spans = record.rollout.links[at].spans
    first, second = PolicySpan.FromString(spans[0].SerializeToString()), spans[1]
    spans[0].CopyFrom(second)
    spans[1].CopyFrom(first)
    return f"links[{at}].spans"


def remove_a_span(draw: random.Random, record: JournalRollout, at: int) -> str:
    spans = record.rollout.links[at].spans
    del spans[draw.randrange(len(spans))]
    return f"links[{at}].spans"


def empty_a_span(draw: random.Random, record: JournalRollout, at: int) -> str:
    each = draw.choice(record.rollout.links[at].spans)
    each.end = each.start
    return f"links[{at}].spans"


def end_a_span_beyond_the_link(draw: random.Random, record: JournalRollout, at: int) -> str:
    link = record.rollout.links[at]
    link.spans[-1].end = len(link.token_ids) + draw.randint(1, 1000)
    return f"links[{at}].spans"


def cover_unsampled_tokens(_draw: random.Random, record: JournalRollout, at: int) -> str:
    record.rollout.links[at].spans[0].start -= 1
    return f"links[{at}].spans"


def name_unpublished_weights(draw: random.Random, record: JournalRollout, at: int) -> str:
    each = draw.choice(record.rollout.links[at].spans)
    each.sampled.CopyFrom(draw.choice([version(7), version(1 << 40), version(3, epoch=2)]))
    return f"links[{at}].spans"


def name_unpublished_context(draw: random.Random, record: JournalRollout, at: int) -> str:
    each = draw.choice(record.rollout.links[at].spans)
    each.context.CopyFrom(draw.choice([version(0), version(2), version(3, epoch=9)]))
    return f"links[{at}].spans"


def make_context_newer(draw: random.Random, record: JournalRollout, at: int) -> str:
    each = draw.choice(record.rollout.links[at].spans)
    each.sampled.CopyFrom(version(3))
    each.context.CopyFrom(version(4))
    return f"links[{at}].spans"


def hide_the_oldest_version(_draw: random.Random, record: JournalRollout, at: int) -> str:
    record.rollout.links[at].spans[0].context.CopyFrom(version(3))
    record.rollout.links[at].spans[0].sampled.CopyFrom(version(3))
    for link in record.rollout.links[:at]:
        for each in link.spans:
            each.context.CopyFrom(version(5))
            each.sampled.CopyFrom(version(5))
    record.rollout.oldest.CopyFrom(version(5))
    return "oldest"


def name_unpublished_oldest(draw: random.Random, record: JournalRollout, _at: int) -> str:
    record.rollout.oldest.CopyFrom(draw.choice([version(0), version(2), version(1, epoch=7)]))
    return "oldest"


def spoil_reward(draw: random.Random, record: JournalRollout, _at: int) -> str:
    record.reward.reward = draw.choice([math.nan, math.inf, -math.inf, 1e30, -1e7])
    return "reward"


DAMAGES: tuple[Damage, ...] = (
    shorten_mask,
    lengthen_logprobs,
    shorten_tokens,
    exceed_vocabulary,
    give_negative_id,
    remove_tokens,
    remove_links,
    exceed_a_million_tokens,
    sample_the_first_token,
    give_other_mask_byte,
    overlap_spans,
    swap_spans,
    remove_a_span,
    empty_a_span,
    end_a_span_beyond_the_link,
    cover_unsampled_tokens,
    name_unpublished_weights,
    name_unpublished_context,
    make_context_newer,
    hide_the_oldest_version,
    name_unpublished_oldest,
    spoil_reward,
)


def refusals(cases: int) -> Mapping[str, int]:
    """Refusals of so many damaged records, by damage; a record that passes is none."""
    found: Counter[str] = Counter()
    for seed in range(cases):
        draw = random.Random(seed)
        record = sound_record(draw)
        check(record)
        damage = DAMAGES[seed % len(DAMAGES)]
        field = damage(draw, record, draw.randrange(len(record.rollout.links)))
        with pytest.raises(InvalidFieldError) as caught:
            check(record)
        assert caught.value.field == field, f"seed {seed}, {damage.__name__}: {caught.value}"
        found[damage.__name__] += 1
    return found


def test_each_of_500_malformed_trajectories_is_refused_by_its_field() -> None:
    found = refusals(CASES)
    assert sum(found.values()) == CASES
    assert set(found) == {damage.__name__ for damage in DAMAGES}

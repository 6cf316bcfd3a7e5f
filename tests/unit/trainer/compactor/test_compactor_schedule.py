"""When a keyframe is due, when it is overdue, and which way a copy goes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.blobs import ObjectInfo
from etude.common.weights import VersionId
from etude.common.weights.protocol.listing import FoldedObjects, Listing
from etude.common.weights.protocol.plan import CandidateStep, cheapest
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.trainer.compactor.parts import split_parts
from etude.trainer.compactor.report import CompactorFailure, CompactorReport, describe_overdue
from etude.trainer.compactor.schedule import (
    EMPTY,
    ChainState,
    KeyframeCadence,
    is_keyframe_due,
    measure_chain,
    strides_at,
    versions_to_visit,
)

V0, V5, V9 = (VersionId(1, number) for number in (0, 5, 9))


def info(size: int) -> ObjectInfo:
    return ObjectInfo("key", size, "", 0.0)


def of(*, versions: int = 0, num_bytes: int = 0, anchor_bytes: int = 0) -> ChainState:
    return ChainState(V9, V0, anchor_bytes, versions, num_bytes)


def report(
    state: ChainState, *failures: CompactorFailure, is_overdue: bool = False
) -> CompactorReport:
    return CompactorReport(
        state, is_overdue, cut_off_at=None, written=(), collected=0, failures=failures
    )


def test_a_chain_is_counted_from_the_last_complete_copy() -> None:
    chain = [VersionId(1, number) for number in range(10)]
    listing = Listing(payloads={each: [info(10 + each.number)] for each in chain}, complete={V0})
    assert measure_chain(chain, listing) == ChainState(V9, V0, 10, 9, sum(range(11, 20)))
    listing.keyframes[V5] = FoldedObjects(None, [info(1000)])
    assert measure_chain(chain, listing).anchor == V0  # it has no record yet
    listing.keyframes[V5].record = info(3)
    assert measure_chain(chain, listing) == ChainState(V9, V5, 1000, 4, 16 + 17 + 18 + 19)
    assert measure_chain([], listing) == EMPTY


@pytest.mark.parametrize(
    ("state", "due"),
    [
        (of(versions=99, anchor_bytes=1000), False),
        (of(versions=100, anchor_bytes=1000), True),
        (of(versions=8, num_bytes=499, anchor_bytes=1000), False),
        (of(versions=8, num_bytes=500, anchor_bytes=1000), True),
        (of(versions=7, num_bytes=9000, anchor_bytes=1000), False),
        (of(versions=0, num_bytes=0, anchor_bytes=0), False),
        (ChainState(V9, None, 0, 9, 900), False),
        (ChainState(V9, None, 0, 9, 1000), True),
    ],
)
def test_a_keyframe_is_due_by_count_or_by_bytes(state: ChainState, *, due: bool) -> None:
    assert is_keyframe_due(state, KeyframeCadence(100, 0.5), model_bytes=2000) is due


def test_a_keyframe_is_overdue_at_twice_its_cadence() -> None:
    cadence = KeyframeCadence(100, 0.5)
    assert not is_keyframe_due(of(versions=199, anchor_bytes=1000), cadence, 0, times=2)
    assert is_keyframe_due(of(versions=200, anchor_bytes=1000), cadence, 0, times=2)
    assert not is_keyframe_due(
        of(versions=9, num_bytes=999, anchor_bytes=1000), cadence, 0, times=2
    )
    assert is_keyframe_due(of(versions=9, num_bytes=1000, anchor_bytes=1000), cadence, 0, times=2)


def test_what_keeps_a_keyframe_from_being_written_is_said() -> None:
    late = report(of(versions=3), CompactorFailure("keyframe", "disk full"), is_overdue=True)
    found = describe_overdue(late, newest=9, first=0, versions=2)
    assert found == (
        "3 versions were published since the last complete copy, one is due every 2:"
        " keyframe: disk full"
    )


def test_a_compactor_that_does_not_answer_is_noticed_by_what_was_published_meanwhile() -> None:
    seen = report(of(versions=10))
    assert describe_overdue(seen, newest=198, first=0, versions=100) == ""
    assert "the compactor does not answer" in describe_overdue(
        seen, newest=199, first=0, versions=100
    )
    assert describe_overdue(None, newest=250, first=51, versions=100) == ""
    assert "200 versions" in describe_overdue(None, newest=251, first=51, versions=100)


def test_a_copy_that_is_near_goes_over_each_version_and_one_that_is_far_jumps() -> None:
    chain = [VersionId(1, number) for number in range(10)]
    assert versions_to_visit(chain, V5, most=4) == chain[6:]
    assert versions_to_visit(chain, V5, most=3) == [V9]
    assert versions_to_visit(chain, None, most=99) == [V9]
    assert versions_to_visit(chain, VersionId(2, 3), most=99) == [V9]
    assert versions_to_visit(chain, V9, most=99) == []
    assert versions_to_visit([], V9, most=99) == []


@given(st.integers(0, 10_000))
def test_strides_end_at_their_multiples(number: int) -> None:
    assert strides_at(number, [64, 8]) == [s for s in (8, 64) if number / s == number // s]


@pytest.mark.parametrize("strides", [(8, 64), (4, 16, 64, 256)])
@given(start=st.integers(0, 1000))
def test_a_reader_up_to_a_thousand_versions_behind_takes_few_steps(
    strides: tuple[int, ...], start: int
) -> None:
    # Sizes as measured: a fold of n versions is smaller than n deltas, and a keyframe 100 deltas.
    chain = [VersionId(1, number) for number in range(1101)]
    steps = [CandidateStep("delta", a, b, 100) for a, b in itertools.pairwise(chain)]
    for stride in strides:
        size = int(100 * stride**0.75)
        ends = chain[::stride]
        steps += [CandidateStep("skip", a, b, size) for a, b in itertools.pairwise(ends)]
    steps += [CandidateStep("keyframe", None, each, 15_000) for each in chain[::100]]
    target = chain[start + 100]
    way = cheapest(chain[: target.number + 1], steps, chain[0])
    assert way is not None
    assert len(way) <= 2 * 7 * len(strides)
    from_nothing = cheapest(chain[: target.number + 1], steps, None)
    assert from_nothing is not None
    assert from_nothing[0].kind == "keyframe"
    assert len(from_nothing) <= 2 * 7 * len(strides)


@given(st.data())
def test_parts_hold_every_element_once_and_none_is_much_larger_than_it_may_be(
    data: st.DataObject,
) -> None:
    shapes = data.draw(
        st.lists(st.lists(st.integers(0, 90), max_size=3).map(tuple), min_size=1, max_size=5)
    )
    specs = tuple(
        TensorSpec(
            name=f"t{place}",
            dtype="BF16",
            shape=shape,
            split=data.draw(st.sampled_from(["rows", "columns"])),
        )
        for place, shape in enumerate(shapes)
    )
    schema = Schema(grid=2, tensors=specs)
    sizes = [spec.num_bytes for spec in specs]
    part_bytes = data.draw(st.integers(200, 20_000))
    seen = [0] * len(specs)
    for part in split_parts(schema, sizes, part_bytes=part_bytes):
        assert part
        for tensor, shard in part:
            assert shard.start == seen[tensor] < shard.stop
            seen[tensor] = shard.stop
    assert seen == [spec.elements for spec in specs]

"""Followers of the turn log: each turn once, whatever is removed behind them and whenever."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.feedback.failing_store import KilledError, KilledStore, KillPoint
from tests.support.feedback.turns import turn, write_turns
from typing_extensions import override

from etude.common.blobs import MemoryStore, ObjectInfo
from etude.common.turns import turn_log
from etude.feedback.windows.feeds import TurnFeed
from etude.v1 import turns_pb2

WRITERS = ("a", "b", "c")
Action = tuple[str, int]
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(WRITERS), st.integers(1, 3)),
        st.tuples(st.just("look"), st.integers(0, 5)),
        st.tuples(st.just("remove"), st.integers(0, 400)),
        st.tuples(st.just("wait"), st.integers(1, 900)),
    ),
    max_size=40,
)


@dataclass(slots=True)
class FollowedStore(MemoryStore):
    """Has a clock, and counts what is listed."""

    now_s: float = 1_000_000.0
    num_listed: int = 0
    listings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = lambda: self.now_s

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        self.listings.append(prefix)
        for info in MemoryStore.list(self, prefix, after):
            self.num_listed += 1
            yield info

    @override
    def list_folders(self, prefix: str) -> Sequence[str]:
        keys = [key for key in self.objects if key.startswith(prefix)]
        return sorted({key.removeprefix(prefix).partition("/")[0] for key in keys})


def names(store: MemoryStore) -> list[str]:
    return [each.turn_id for each in turn_log.read_turns(store)]


@settings(deadline=None)
@given(ACTIONS, st.sampled_from([0.0, 60.0, 3_600.0]))
def test_a_follower_sees_each_turn_once_unless_it_was_removed_before_it_looked(
    actions: list[Action], horizon_s: float
) -> None:
    store = FollowedStore()
    feed = TurnFeed(store, horizon_s, clock_s=lambda: store.now_s)
    seen: Counter[str] = Counter()
    written: list[str] = []
    following: Counter[str] = Counter()
    lost: set[str] = set()

    def look(most: int) -> None:
        """Read some objects: a follower may fail in the middle."""
        for number, stored in enumerate(feed.read()):
            seen.update(each.turn_id for each in stored.segment.turns)
            if number == most:
                break

    for name, number in actions:
        match name:
            case "look":
                look(number)
            case "remove":
                before = set(names(store))
                turn_log.remove_turns(store, before_ms=int(1_000 * (store.now_s - number)))
                lost |= before - set(names(store)) - seen.keys()
            case "wait":
                store.now_s += number
            case writer:
                turns = [turn("u", f"{len(written)}-{n}", started_ms=1) for n in range(number)]
                written += [each.turn_id for each in turns]
                first = following[writer]
                segment = turns_pb2.TurnSegment(writer=writer, first=first, turns=turns)
                store.create(turn_log.segment_key(writer, first), turn_log.encode_segment(segment))
                following[writer] += number
    store.now_s += 3_600  # the longest silence
    look(1_000)
    assert seen == Counter(set(written) - lost)


def test_a_look_lists_nothing_that_was_read_and_few_writers_that_are_silent() -> None:
    store = FollowedStore()
    feed = TurnFeed(store, horizon_s=3_600.0, clock_s=lambda: store.now_s)
    for writer in WRITERS:
        for number in range(50):
            write_turns(store, [turn("u", str(number), started_ms=1)], writer)
    assert len(list(feed.read())) == 150
    store.num_listed, store.listings = 0, []
    write_turns(store, [turn("u", "new", started_ms=1)], "b")
    store.num_listed = 0
    assert [each.key for each in feed.read()] == [turn_log.segment_key("b", 50)]
    assert store.num_listed == 1
    store.now_s += 590
    write_turns(store, [turn("u", "newer", started_ms=1)], "a")
    store.now_s += 20
    list(feed.read())
    store.listings = []
    store.now_s += 5
    list(feed.read())
    assert store.listings == ["turns/a/"]  # ten minutes after those of b and c


@pytest.mark.parametrize("takes_effect", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 1_000])
def test_a_removal_that_is_killed_anywhere_leaves_no_gap_and_is_finished_by_the_next(
    monkeypatch: pytest.MonkeyPatch, *, batch: int, takes_effect: bool
) -> None:
    monkeypatch.setattr(turn_log, "_DELETE_AT_ONCE", batch)
    objects: dict[str, bytes] = {}
    for writer in WRITERS:
        for number in range(4):
            store = MemoryStore(objects=objects)
            write_turns(store, [turn(writer, str(number), started_ms=1)], writer)
    times = {key: 1_000.0 + int(key[-16:-4]) for key in objects}
    left = sorted(f"{writer}-{n}-b-0" for writer in WRITERS for n in (2, 3))
    num_kills = 0
    while True:
        point = KillPoint(at=num_kills + 1, takes_effect=takes_effect)
        killed = KilledStore(point=point, objects=dict(objects), _modified_s=dict(times))
        try:
            turn_log.remove_turns(killed, before_ms=1_001_500)
        except KilledError:
            num_kills += 1
        else:
            break
        after = MemoryStore(objects=killed.objects, _modified_s=dict(times))
        # All, if it was killed before its record; else nothing that it was to remove.
        assert sorted(names(after)) in (left, sorted(names(MemoryStore(objects=objects))))
        turn_log.remove_turns(after, before_ms=1_001_501)
        assert sorted(names(after)) == left
        assert len([*after.list(turn_log.PREFIX)]) == len(left)
    assert num_kills == 2 + -(-6 // batch)

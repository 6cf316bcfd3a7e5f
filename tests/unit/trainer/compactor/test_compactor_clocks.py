"""Clocks that are wrong by a day change nothing: not what is published, read, refused or deleted.

Publisher, reader and compactor each live by a clock of their own; the store has its own, too. What
they do is compared with what they do by right clocks.
"""

import contextlib
import datetime
import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest
from typing_extensions import override

from etude.cli.weights.verification import verify
from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.errors import FencedError
from etude.common.weights import VersionId
from etude.common.weights.protocol.listing import take_listing
from etude.common.weights.protocol.reader_leases import ReaderLease
from etude.common.weights.replicas.mirror import Mirror

MakeCompactor = Callable[..., Any]

DAY_S = 86_400.0
RIGHT = (0.0, 0.0, 0.0)
RANDOM = ("weights/epochs/", "weights/leases/")
"""Records with numbers that are drawn: a nonce, a serial."""
SETTINGS = {"every": 4, "skips": [2], "retainVersions": 3, "retainKeyframes": 1}


@contextlib.contextmanager
def clock_off_by(offset_s: float) -> Iterator[None]:
    """Whoever asks for the time in this block is told a wrong one."""
    right = time.time

    class Wrong(datetime.datetime):
        @classmethod
        @override
        def now(cls, tz: datetime.tzinfo | None = None) -> Self:
            return cls.fromtimestamp(right() + offset_s, tz)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "time", lambda: right() + offset_s)
        patched.setattr(time, "time_ns", lambda: int((right() + offset_s) * 1e9))
        patched.setattr(datetime, "datetime", Wrong)
        yield


class Outcome(NamedTuple):
    """Everything that clocks must not change."""

    went: list[list[str]]
    """Kinds of the edges over which the reader came to each version."""
    collected: list[int]
    """Objects that each round of the compactors deleted."""
    objects: dict[str, bytes]
    """What is in the store at the end."""


class Scene:
    """A publisher that is replaced, a reader that follows, and the compactor of each epoch."""

    def __init__(
        self, trained: Any, keep: MakeCompactor, folder: Path, clocks: tuple[float, float, float]
    ) -> None:
        self.trained = trained
        self.store: MemoryStore = trained.store
        self.now_s = 1e9
        self.store.clock = lambda: self.now_s
        self.publishing_s, self.reading_s, self.keeping_s = clocks
        self.make_compactor = lambda epoch: keep(
            self.store, epoch=epoch, folder=f"{folder.name}-{epoch}", **SETTINGS
        )
        self.reader = Mirror(self.store, folder)
        self.lease = ReaderLease(self.store, "r0")
        self.outcome = Outcome([], [], {})

    def follow(self, compactor: Any, version: VersionId) -> None:
        """One version on its way, with half an hour of the store's time around it."""
        with clock_off_by(self.publishing_s):
            self.trained.publish(version.number, epoch=version.epoch)
        with clock_off_by(self.reading_s):
            self.lease.plan_path(version)
            self.outcome.went.append([edge.kind for edge in self.reader.move_to(version)])
            assert self.reader.ref is not None
            self.lease.record_live(self.reader.ref)
        assert self.trained.is_in(self.reader)
        with clock_off_by(self.keeping_s):
            report = compactor.run_round()
        assert report.failures == ()
        self.outcome.collected.append(report.collected)
        self.now_s += 1_800.0

    def play(self) -> Outcome:
        first = self.make_compactor(1)
        for number in range(1, 9):
            self.follow(first, VersionId(1, number))
        orphan = weights.publish_payload(self.store, VersionId(1, 9), 0, b"never committed")
        with clock_off_by(self.publishing_s):
            self.trained.open(VersionId(1, 8), "takeover")
            with pytest.raises(FencedError):
                self.trained.publish(9)
        self.trained.back_to(VersionId(1, 8))
        with clock_off_by(self.keeping_s), pytest.raises(FencedError):
            first.run_round()
        second = self.make_compactor(2)
        swept_after = None
        for number in range(9, 17):
            self.follow(second, VersionId(2, number))
            if swept_after is None and self.store.head(orphan) is None:
                swept_after = number
        # An hour, counted by the store's clock between two of its own objects.
        assert swept_after == 11
        self.outcome.objects.update(
            {k: v for k, v in self.store.objects.items() if not k.startswith(RANDOM)}
        )
        return self.outcome


@pytest.fixture
def play(
    trained: Any, keep: MakeCompactor, tmp_path: Path
) -> Callable[[tuple[float, float, float]], Outcome]:
    """The same play from the same beginning, by other clocks."""
    begun = dict(trained.store.objects)
    plays = itertools.count()

    def by(clocks: tuple[float, float, float]) -> Outcome:
        store = MemoryStore(objects=dict(begun))
        again = type(trained)(store, words=dict(trained.words), of=dict(trained.of))
        again.words = dict(trained.words)
        again.manifest = trained.manifest
        return Scene(again, keep, tmp_path / f"play-{next(plays)}", clocks).play()

    return by


def test_clocks_that_are_off_by_a_day_change_nothing(
    play: Callable[[tuple[float, float, float]], Outcome],
) -> None:
    right = play(RIGHT)
    assert sum(right.collected) > 20
    assert {kind for kinds in right.went for kind in kinds} >= {"delta"}
    for one, other, third in itertools.product((-DAY_S, DAY_S), repeat=3):
        wrong = play((one, other, third))
        assert wrong.went == right.went
        assert wrong.collected == right.collected
        assert wrong.objects == right.objects


@pytest.mark.parametrize("seed", range(4))
def test_a_clock_of_the_store_that_jumps_by_a_day_takes_nothing_that_is_needed(
    trained: Any, keep: MakeCompactor, tmp_path: Path, seed: int
) -> None:
    """It alone tells the age of an upload that nothing names; the newest object is its now."""
    store, chance = trained.store, random.Random(seed)
    store.clock = lambda: 1e9 + chance.choice([-DAY_S, 0.0, DAY_S])
    compactor = keep(store, **SETTINGS)
    reader, lease = Mirror(store, tmp_path / "reader"), ReaderLease(store, "r0")
    for number in range(1, 13):
        upload = weights.publish_payload(store, VersionId(1, number + 1), 0, b"under way")
        trained.publish(number)
        if chance.random() < 0.5:
            lease.plan_path(VersionId(1, number))
            reader.move_to(VersionId(1, number))
            assert reader.ref is not None
            lease.record_live(reader.ref)
            assert trained.is_in(reader)
        assert compactor.run_round().failures == ()
        assert store.head(upload) is not None
    assert [v for v in verify(store, tmp_path / "verified") if v.problem] == []
    assert take_listing(store).keyframes

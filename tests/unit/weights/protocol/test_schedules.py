"""Checks of the protocol that chance seldom misses: each has an order of calls that needs it.

A schedule passes with the protocol as it is, and must fail once the check that it is about is
taken out.
"""

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from etude.common.weights import VersionId
from etude.common.weights.protocol.garbage_collector import GarbageCollector
from etude.common.weights.protocol.plan import oldest_needed
from etude.common.weights.protocol.tombstones import Trash, read_trash

play = runpy.run_path(str(Path(__file__).with_name("schedules.py")))
SCHEDULES: dict[str, Callable[[Any], None]] = play["SCHEDULES"]


@pytest.fixture
def cast() -> Iterator[Any]:
    cast = play["Cast"]()
    yield cast
    cast.leave()


@pytest.mark.parametrize("sentence", SCHEDULES)
def test_in_one_order_of_calls(cast: Any, sentence: str) -> None:
    SCHEDULES[sentence](cast)


def of(module: str) -> Any:
    return sys.modules[f"etude.common.weights.protocol.{module}"]


def nothing(*_: object, **__: object) -> None:
    """Stands for a check."""


def no(*_: object) -> bool:
    return False


def overwrites(store: Any, key: str, data: bytes) -> bytes:
    store.put(key, data)
    return data


def asked(refuse: Callable[..., None], *, first: bool) -> Callable[..., None]:
    """Asked the first time only, or the second."""
    times: list[object] = []

    def other(store: Any, version: VersionId) -> None:
        times.append(version)
        if (len(times) % 2 == 1) == first:
            refuse(store, version)

    return other


def plans_once(self: Any, target: VersionId, **_: Any) -> Any:
    """Writes the lease, and relies on what was planned before."""
    edges = of("plan").plan_path(self.store, self.live, target, avoid=read_trash(self.store).keys)
    self._write(oldest_needed(edges))
    return edges


def writes_no_lease(self: Any, wanted: Any) -> None:
    self._is_written, self._needs = True, wanted


def minds_nothing(collector: Any) -> Any:
    """Looks again, and sees nobody who needs anything."""
    found = LOOK(collector)
    return type(found)(found.deletable, set())


def follows_the_epoch(collector: Any) -> Any:
    """Does not mind that another epoch is open."""
    latest = of("epochs").latest_epoch(collector.store)
    collector.epoch = latest.epoch
    return LOOK(collector)


def deletes_at_once(collector: Any) -> list[str]:
    """Writes no tombstone: it looks, and later deletes."""
    doomed: list[str] = LOOK(collector).deletable
    if doomed:
        collector.store.delete(doomed)
    return doomed


def takes_all_back(collector: Any, _ids: set[str]) -> None:
    collector.store.delete([each.key for each in read_trash(collector.store).tombstones])


LOOK = GarbageCollector._observe
REFUSE = of("publication")._refuse_fenced
DELETIONS = of("retention").deletable_keys


class Broken(NamedTuple):
    """A check that is taken out, and the schedule that notices."""

    sentence: str
    place: str
    """What is replaced: a name in a module of the protocol."""
    other: Any


BROKEN = {
    "no fence before payloads are looked for": Broken(
        "a fenced publisher is told so whatever was collected meanwhile",
        "publication._refuse_fenced",
        asked(REFUSE, first=False),
    ),
    "no fence right before the manifest": Broken(
        "a publisher that was overtaken during its commit publishes nothing",
        "publication._refuse_fenced",
        asked(REFUSE, first=True),
    ),
    "a manifest overwrites": Broken(
        "of two contents of a version the first stays",
        "publication.records.create_once",
        overwrites,
    ),
    "a lost reply is a failure": Broken(
        "a commit that is repeated after its reply was lost is one version",
        "publication.records.create_once",
        lambda store, key, data: store.create(key, data) or data,
    ),
    "an epoch overwrites": Broken(
        "two publishers that open at once do not share an epoch",
        "epochs.records.create_once",
        overwrites,
    ),
    "refused versions are published": Broken(
        "a version that was refused before its publisher heard of it is not built upon",
        "publication.is_quarantined",
        no,
    ),
    "refused versions are built upon": Broken(
        "nothing builds on a refused version", "publication.is_quarantined", no
    ),
    "any base is built upon": Broken(
        "nothing builds on a version that the take over left out",
        "publication._check_base",
        nothing,
    ),
    "the base's manifest is not compared": Broken(
        "nothing builds on what another published under the bases name",
        "publication._check_base",
        nothing,
    ),
    "the schema is not looked for": Broken(
        "a version whose schema never arrived is not published",
        "publication.schema_key",
        lambda _: "weights/epochs/000001.json",
    ),
    "numbers go on from the parent": Broken(
        "numbers rise over take overs", "epochs.list_all_published", lambda _: []
    ),
    "numbers go on from what is published": Broken(
        "numbers of deleted versions do not come again",
        "epochs._first_number",
        lambda store, _: max(v.number + 1 for v in of("versions").list_all_published(store)),
    ),
    "an opener does not look at the trash": Broken(
        "who resumes from what is being deleted begins a new chain",
        "publication.read_trash",
        lambda _: Trash([], []),
    ),
    "readers do not ask for newer epochs": Broken(
        "a reader that moves during a take over serves nothing abandoned",
        "chain.is_fenced",
        no,
    ),
    "readers write no lease": Broken(
        "a reader that planned before the tombstone keeps its objects",
        "reader_leases.ReaderLease._write",
        writes_no_lease,
    ),
    "collectors do not look at leases": Broken(
        "a reader that planned before the tombstone keeps its objects",
        "garbage_collector.observe_leases",
        lambda _: [],
    ),
    "readers do not look at the trash after the lease": Broken(
        "a reader whose lease came after the last look plans around the tombstone",
        "reader_leases.ReaderLease.plan_path",
        plans_once,
    ),
    "readers do not see tombstones": Broken(
        "a reader whose lease came after the last look plans around the tombstone",
        "reader_leases.read_trash",
        lambda _: Trash([], []),
    ),
    "no tombstone": Broken(
        "a reader whose lease came after the last look plans around the tombstone",
        "garbage_collector.GarbageCollector.collect",
        deletes_at_once,
    ),
    "no second look": Broken(
        "a reader whose lease came before the tombstone is seen by the last look",
        "garbage_collector.GarbageCollector._observe",
        minds_nothing,
    ),
    "leases never move": Broken(
        "a reader that moves on needs only what is ahead",
        "reader_leases.ReaderLease.record_live",
        lambda lease, live: setattr(lease, "live", live),
    ),
    "readers go over refused versions": Broken(
        "a reader goes around a refused version",
        "chain_view.list_quarantined",
        lambda _: frozenset(),
    ),
    "readers serve refused versions": Broken(
        "a refused version is not served", "chain_view.list_quarantined", lambda _: frozenset()
    ),
    "a collector does not mind another epoch": Broken(
        "a collector that sleeps through a take over deletes nothing",
        "garbage_collector.GarbageCollector._observe",
        follows_the_epoch,
    ),
    "anybody's tombstones are taken back": Broken(
        "a tombstone that another collector carries out is not taken back",
        "garbage_collector.GarbageCollector._withdraw",
        takes_all_back,
    ),
    "no tombstone is taken back": Broken(
        "a tombstone that was never used is taken back",
        "garbage_collector.GarbageCollector._withdraw",
        nothing,
    ),
    "what is ahead of the chain is dead": Broken(
        "what is published while a collector lists is not announced", "retention._is_ahead", no
    ),
    "a refused version is an anchor": Broken(
        "a refused version is nobodys beginning",
        "garbage_collector.list_quarantined",
        lambda _: frozenset(),
    ),
    "payloads go before manifests": Broken(
        "a collector that dies half way leaves no name without its objects",
        "garbage_collector.deletable_keys",
        lambda *args: DELETIONS(*args)[::-1],
    ),
    "the oldest manifest goes first": Broken(
        "a chain that a dead collector shortened has no hole",
        "garbage_collector.deletable_keys",
        lambda *args: sorted(DELETIONS(*args), key=lambda key: ("manifests" not in key, key)),
    ),
    "orphans are swept at once": Broken(
        "what an overtaken publisher is about to name is left to it for a while",
        "retention._old",
        lambda infos, _: [info.key for info in infos],
    ),
}


@pytest.mark.parametrize("check", BROKEN)
def test_without_the_check_its_schedule_fails(
    monkeypatch: pytest.MonkeyPatch, cast: Any, check: str
) -> None:
    broken = BROKEN[check]
    *path, name = broken.place.split(".")
    where = of(path[0])
    for each in path[1:]:
        where = getattr(where, each)
    monkeypatch.setattr(where, name, broken.other)
    # One that waits for a call that never comes raises LookupError, and has shown nothing.
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        SCHEDULES[broken.sentence](cast)

"""A run that is suspended, deleted or killed while it publishes: its chain is sound afterwards.

On a folder, with the real packer. A deleted run is killed, too, when its time to end is over; what
it leaves is what a run that resumes finds.
"""

import asyncio
import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import Buffer, override

from etude.cli.weights.verification import verify
from etude.common import weights
from etude.common.blobs import MissingError, ObjectInfo, Store, open_store
from etude.common.weights import GarbageCollector, VersionId
from etude.common.weights.protocol.listing import take_listing
from etude.common.weights.protocol.retention import ORPHAN_S
from etude.common.weights.protocol.versions import list_all_published
from etude.trainer.controller.program import train
from etude.trainer.controller.run import Run, root_cause
from etude.v1 import run_pb2

MakeWorld = Callable[..., Any]

POINTS = [
    ("before", "weights/deltas/"),
    ("after", "weights/deltas/"),
    ("before", "weights/manifests/"),
    ("after", "weights/manifests/"),
]
"""Around the two writes of a publish."""
FIRST, LATER = VersionId(1, 0), VersionId(1, 3)
"""The version with which a run begins, and one of its deltas."""


@dataclass(slots=True)
class Interrupting(Store):
    """A folder in which something happens around one write."""

    folder: Path
    when: str = ""
    prefix: str = ""
    act: Callable[[], None] = lambda: None
    inner: Store = field(init=False)
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.url = self.folder.as_uri()
        self.inner = open_store(self.url)

    def arm(self, when: str, prefix: str, act: Callable[[], None]) -> None:
        """Do this once, before or after the next write below the prefix."""
        self.when, self.prefix, self.act = when, prefix, act

    @property
    def objects(self) -> dict[str, bytes]:
        """Everything that is there; a sweep of the run that was killed may still be at work."""
        found = {}
        for info in self.inner.list(""):
            with contextlib.suppress(MissingError):
                found[info.key] = self.inner.get(info.key)
        return found

    @override
    def put(self, key: str, data: Buffer) -> None:
        self._meet("before", key)
        self.inner.put(key, data)
        self._meet("after", key)

    @override
    def create(self, key: str, data: bytes) -> None:
        self._meet("before", key)
        self.inner.create(key, data)
        self._meet("after", key)

    def _meet(self, when: str, key: str) -> None:
        if when == self.when and key.startswith(self.prefix):
            self.when = ""
            self.act()

    @override
    def get(self, key: str) -> bytes:
        return self.inner.get(key)

    @override
    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.inner.get_range(key, start, length)

    @override
    def view(self, key: str, start: int, length: int) -> memoryview:
        return self.inner.view(key, start, length)

    @override
    def head(self, key: str) -> ObjectInfo | None:
        return self.inner.head(key)

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return self.inner.list(prefix, after)

    @override
    def delete(self, keys: Sequence[str]) -> None:
        self.inner.delete(keys)


@pytest.fixture
def store(tmp_path: Path) -> Interrupting:
    return Interrupting(tmp_path / "run")


def prefix_of(kind: str, version: VersionId) -> str:
    return f"{kind}{version.epoch:06d}/{version.number:012d}"


def assert_sound(store: Store, folder: Path) -> None:
    """As `etude weights verify` says it: damaged 0."""
    verdicts = list(verify(store, folder))
    assert verdicts
    assert [verdict for verdict in verdicts if verdict.problem] == []


def told(run: Run, how: str) -> Callable[[], None]:
    """Has the run end as an operator's order, or the end of its pod, does."""
    loop = asyncio.get_running_loop()
    orders = {
        "suspend": lambda: run.commands.accept(
            run_pb2.CommandRequest(command_id="1", suspend=run_pb2.SuspendRun(checkpoint=True))
        ),
        "delete": run.commands.request_stop,
    }

    def tell() -> None:
        # Manifests are written beside the loop: it has heard of the order before they are there.
        if threading.current_thread() is threading.main_thread():
            orders[how]()
            return
        heard = threading.Event()
        loop.call_soon_threadsafe(orders[how])
        loop.call_soon_threadsafe(heard.set)
        assert heard.wait(10)

    return tell


@pytest.mark.parametrize("how", ["suspend", "delete"])
@pytest.mark.parametrize(
    ("point", "version"), list(itertools.product(POINTS, [FIRST, LATER])), ids=str
)
async def test_a_publish_under_way_is_finished_and_the_run_resumes_to_the_same_weights(
    make_world: MakeWorld,
    uninterrupted: str,
    store: Interrupting,
    point: tuple[str, str],
    version: VersionId,
    how: str,
) -> None:
    world = make_world(store)

    def prepare(run: Run) -> None:
        store.arm(point[0], prefix_of(point[1], version), told(run, how))

    assert not await world.train(prepare)
    assert store.when == ""
    if version == LATER:
        assert weights.accepted_chain(store)[-1] == version
        assert_sound(store, store.folder.parent / "stopped")
    assert await world.train()
    assert world.digest == uninterrupted
    assert world.audit(max_staleness=0).findings == []
    assert_sound(store, store.folder.parent / "resumed")


class KilledError(ConnectionError):
    """Nothing that this controller does afterwards counts."""


def killed() -> None:
    raise KilledError


@pytest.mark.parametrize(
    ("point", "version"), list(itertools.product(POINTS, [FIRST, LATER])), ids=str
)
async def test_a_publish_that_is_cut_off_is_abandoned_and_its_payload_swept_when_it_is_old(
    make_world: MakeWorld,
    uninterrupted: str,
    store: Interrupting,
    point: tuple[str, str],
    version: VersionId,
) -> None:
    world = make_world(store)
    run, sets, checkpoint = world.start()
    store.arm(point[0], prefix_of(point[1], version), killed)
    with pytest.raises((ExceptionGroup, KilledError)) as caught:
        await asyncio.wait_for(train(run, sets, checkpoint=checkpoint), 60)
    assert isinstance(root_cause(caught.value), KilledError)
    is_there = point == ("after", "weights/manifests/")
    assert (version in list_all_published(store)) is is_there

    assert await world.train()
    assert world.digest == uninterrupted
    assert world.audit(max_staleness=0).findings == []
    assert_sound(store, store.folder.parent / "resumed")
    orphans = _orphans(store)
    assert bool(orphans) is (point in POINTS[1:3])
    _age(store.folder, orphans)
    kept = weights.accepted_chain(store)
    GarbageCollector(store=store, epoch=2, resumable=lambda: kept).collect()
    assert _orphans(store) == []
    assert weights.accepted_chain(store) == kept
    assert_sound(store, store.folder.parent / "swept")


def _orphans(store: Store) -> list[str]:
    published = set(list_all_published(store))
    payloads = take_listing(store).payloads
    return [info.key for v, infos in payloads.items() if v not in published for info in infos]


def _age(folder: Path, keys: list[str]) -> None:
    for key in keys:
        then = (folder / key).stat().st_mtime - 2 * ORPHAN_S
        os.utime(folder / key, (then, then))

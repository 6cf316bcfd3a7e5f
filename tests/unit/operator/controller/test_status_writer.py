"""What users are told, and how often at most."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from etude.common.api.meta import Condition
from etude.common.api.pool.status import EnvPoolStatus, Slots
from etude.operator.actions import RecordEvent
from etude.operator.clock import ManualClock
from etude.operator.controller.event_recorder import EVENT_BURST, EventRecorder
from etude.operator.controller.status_writer import STATUS_BURST, StatusDebounce, StatusWriter
from etude.operator.kube.memory_cluster import MemoryCluster
from etude.operator.manifests import Manifest, Ref

POOL = Ref("EnvPool", "lab", "pool")


@dataclass(slots=True)
class CountingCluster(MemoryCluster):
    """Counts what it is told."""

    told: list[str] = field(default_factory=list)

    @override
    async def record_event(self, event: Manifest) -> None:
        self.told.append(event["reason"])


def pool(clock: ManualClock) -> CountingCluster:
    cluster = CountingCluster(clock=clock)
    metadata = {"name": "pool", "namespace": "lab", "uid": "u", "generation": 1}
    spec: dict[str, Any] = {"templates": [{"name": "t"}], "replicas": 1}
    cluster.upsert(
        {"apiVersion": "etude.dev/v1alpha1", "kind": "EnvPool"}
        | {
            "metadata": metadata,
            "spec": spec,
        }
    )
    return cluster


def flapping(number: int) -> EnvPoolStatus:
    condition = Condition.model_validate(
        {
            "type": "Available",
            "status": "True" if number % 2 else "False",
            "reason": "Flaps",
            "message": str(number),
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
    )
    return EnvPoolStatus(conditions=(condition,))


async def test_a_status_that_flaps_is_written_once_a_second_in_the_long_run() -> None:
    clock = ManualClock()
    cluster = pool(clock)
    writer = StatusWriter(
        cluster, clock, EventRecorder(cluster, clock, "test"), StatusDebounce(0.0)
    )
    waits = list[float]()
    for number in range(1_000):
        seen = cluster.get(POOL)
        assert seen is not None
        wait_s = await writer.write(seen, flapping(number))
        waits += [] if wait_s is None else [wait_s]
        clock.advance(0.1)
    written = 1_000 - len(waits)
    assert STATUS_BURST < written <= STATUS_BURST + 100 + 1, "a hundred seconds went by"
    assert all(0 < wait_s <= 1 for wait_s in waits)


async def test_what_is_passing_is_told_once_it_has_held_or_by_what_comes_next() -> None:
    clock = ManualClock()
    cluster = pool(clock)
    writer = StatusWriter(
        cluster, clock, EventRecorder(cluster, clock, "test"), StatusDebounce(0.0, 1.0)
    )

    async def write(number: int, *, is_passing: bool) -> float | None:
        seen = cluster.get(POOL)
        assert seen is not None
        return await writer.write(seen, flapping(number), is_transient=is_passing)

    def told() -> str:
        return str((cluster.get(POOL) or {})["status"]["conditions"][0]["message"])

    assert await write(1, is_passing=False) is None, "nothing is held back that stays"
    assert await write(2, is_passing=True) == 1.0
    clock.advance(0.5)
    assert await write(3, is_passing=True) == 0.5, "the wait does not begin again"
    assert told() == "1"
    assert await write(4, is_passing=False) is None
    assert told() == "4"
    assert await write(5, is_passing=True) == 1.0
    clock.advance(1.0)
    assert await write(6, is_passing=True) is None
    assert told() == "6"


async def test_what_passed_and_came_back_is_no_difference_any_more() -> None:
    clock = ManualClock()
    cluster = pool(clock)
    writer = StatusWriter(
        cluster, clock, EventRecorder(cluster, clock, "test"), StatusDebounce(0.0, 1.0)
    )
    seen = cluster.get(POOL)
    assert seen is not None
    assert await writer.write(seen, flapping(1), is_transient=True) == 1.0
    assert await writer.write(seen, EnvPoolStatus(), is_transient=True) is None
    clock.advance(5.0)
    assert await writer.write(seen, flapping(2), is_transient=True) == 1.0


async def test_figures_alone_are_written_every_few_seconds_and_with_what_lasts_at_once() -> None:
    clock = ManualClock()
    cluster = pool(clock)
    writer = StatusWriter(
        cluster, clock, EventRecorder(cluster, clock, "test"), StatusDebounce(figures_s=5.0)
    )

    async def write(number: int, *, slots: int) -> float | None:
        seen = cluster.get(POOL)
        assert seen is not None
        status = flapping(number).model_copy(update={"slots": Slots(idle=slots)})
        return await writer.write(seen, status)

    def told() -> int:
        return int((cluster.get(POOL) or {})["status"]["slots"]["idle"])

    assert await write(1, slots=1) is None
    clock.advance(2.0)
    assert await write(1, slots=2) == 3.0, "since the last write, and not since they moved"
    assert told() == 1
    assert await write(2, slots=3) is None, "what lasts does not wait, and takes figures along"
    clock.advance(4.0)
    assert await write(2, slots=4) == 1.0
    clock.advance(1.0)
    assert await write(2, slots=5) is None
    assert told() == 5


async def test_events_of_one_object_are_bounded_and_of_others_not() -> None:
    clock = ManualClock()
    cluster = pool(clock)
    recorder = EventRecorder(cluster, clock, "test")
    about = cluster.get(POOL)
    assert about is not None
    for number in range(1_000):
        await recorder.record(
            about, RecordEvent(name=f"n-{number}", reason="Told", message="words")
        )
    assert len(cluster.told) == EVENT_BURST
    other = {**about, "metadata": {**about["metadata"], "uid": "v"}}
    await recorder.record(other, RecordEvent(name="n", reason="Other", message="words"))
    assert cluster.told[-1] == "Other"


@given(name=st.sampled_from(["pool", "p" * 253]), text=st.text(max_size=2_000))
async def test_no_event_is_larger_than_the_api_server_takes(name: str, text: str) -> None:
    clock = ManualClock()
    cluster = MemoryCluster(clock=clock)
    metadata = {"name": name, "namespace": "lab", "uid": "u"}
    about = {"apiVersion": "etude.dev/v1alpha1", "kind": "Checkpoint", "metadata": metadata}
    await EventRecorder(cluster, clock, "test").record(
        about, RecordEvent(name="n", reason=text, message=text)
    )
    (event,) = cluster.events
    assert len(event["metadata"]["name"]) <= 253
    assert len(event["reason"].encode()) <= 128
    assert len(event["note"].encode()) <= 1024
    assert text.startswith(event["note"])

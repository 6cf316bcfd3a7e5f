"""The controller's routing table follows the rotation, and reaches the workers."""

from typing import Any

from tests.support.trainer_simulation.workers import SimulatedRollouts

from etude.common.weights import VersionId
from etude.trainer.controller.publishing.engines import Engines, RoutingBroadcast
from etude.trainer.routing.table import EngineState, Purpose


def engines(**fields: Any) -> Engines:
    return Engines(["a", "b", "c"], timeout_s=1.0, rotation=("a", "b", "c"), **fields)


def test_engines_are_live_lagging_or_draining() -> None:
    found = engines()
    assert {state for _, state in found.routing_table().engines} == {EngineState.LIVE}
    found.rotation = ("a", "c")
    found.limit = 2
    assert dict(found.routing_table().engines) == {
        "a": EngineState.LIVE,
        "b": EngineState.LAGGING,
        "c": EngineState.DRAINING,
    }
    found.rotation = ("a",)
    assert "c" not in dict(found.routing_table().engines)


def test_only_a_change_has_a_new_revision() -> None:
    found = engines()
    first = found.routing_table()
    assert found.routing_table() is first
    found.rotation = ("a",)
    assert found.routing_table().revision == first.revision + 1


def test_engines_for_evaluations_serve_no_training() -> None:
    table = engines(num_for_evaluation=1).routing_table()
    assert table.candidates(Purpose.EVALUATION) == ("a",)
    assert table.candidates(Purpose.TRAINING) == ("b", "c")


async def test_workers_get_each_change_once() -> None:
    found, workers = engines(), SimulatedRollouts(serving=lambda: VersionId(1, 0))
    broadcast = RoutingBroadcast(found, workers)
    for _ in range(3):
        await broadcast.send()
    found.rotation = ("b",)
    await broadcast.send()
    assert [table.revision for table in workers.tables] == [1, 2]

"""A run that could not go on says by its exit code whether waiting would help."""

from collections.abc import Callable
from typing import Any

import pytest
from typing_extensions import Buffer, override

from etude.common.blobs import DeniedError, MemoryStore
from etude.common.errors import StoreError
from etude.trainer.controller.lifecycle import report_failure
from etude.trainer.controller.program import train
from etude.trainer.controller.run import root_cause
from etude.v1 import run_pb2

MakeWorld = Callable[..., Any]


class Choosy(MemoryStore):
    """Refuses keys with some words in them, in one direction each."""

    unread = unwritten = "\0"
    error: StoreError

    @override
    def get(self, key: str) -> bytes:
        if self.unread in key:
            raise self.error
        return super().get(key)

    @override
    def put(self, key: str, data: Buffer) -> None:
        if self.unwritten in key:
            raise self.error
        super().put(key, data)


async def exit_code(world: Any, *, unread: str = "\0") -> int:
    """Of one life of a controller, as its host would have it."""
    run, sets, checkpoint = world.start()
    world.store.unread = unread
    run.reporter.set_state(run_pb2.RUN_STATE_LOADING)
    with pytest.raises(ExceptionGroup) as caught:
        await train(run, sets, checkpoint=checkpoint)
    return report_failure(run.reporter, root_cause(caught.value))


@pytest.mark.parametrize("every_steps", [2, 3])
async def test_a_phase_whose_end_cannot_be_saved_counts_each_time(
    make_world: MakeWorld, every_steps: int
) -> None:
    store = Choosy()
    world = make_world(store, every_steps=every_steps)
    store.error, store.unwritten = StoreError("time-out of an upload"), "/model/"
    assert [await exit_code(world) for _ in range(3)] == [1, 1, 1]
    assert world.runs[-1].progress.cursor.global_step, "it trained all the same"
    store.unwritten = "\0"
    assert await world.train()


@pytest.mark.parametrize(("error", "code"), [(StoreError, 75), (DeniedError, 1)])
async def test_a_store_is_waited_for_while_a_run_loads_unless_it_says_no(
    make_world: MakeWorld, error: type[StoreError], code: int
) -> None:
    store = Choosy()
    world = make_world(store)
    await world.crash(after=3)
    store.error = error("403 or no route")
    assert await exit_code(world, unread="/learner/state.json") == code
    assert world.runs[-1].reporter.status.reason == "StorageUnavailable"
    store.unread = "\0"
    assert await world.train()

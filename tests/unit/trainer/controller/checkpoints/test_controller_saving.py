"""A controller that stalls in the middle of a checkpoint leaves what its successor saved."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from typing_extensions import Buffer, override

from etude.common.blobs import MemoryStore, ObjectInfo
from etude.common.errors import FencedError
from etude.common.weights import claim_epoch

PREFIX = "checkpoints/000000000004/"
SUCCESSORS = PREFIX + "000002/learner/state.json"


@dataclass
class OvertakenStore(MemoryStore):
    """In which a successor takes over and saves at one point of a checkpoint."""

    point: str = ""

    def _overtake(self, point: str) -> None:
        if self.point == point:
            self.point = ""
            claim_epoch(self, holder="successor", parent=None, reason="takeover")
            MemoryStore.put(self, SUCCESSORS, b"{}")

    @override
    def put(self, key: str, data: Buffer) -> None:
        MemoryStore.put(self, key, data)
        if key == PREFIX + "manifest.json":
            self._overtake("manifest")

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        if prefix == PREFIX:
            self._overtake("rests")
        return MemoryStore.list(self, prefix, after)


@pytest.mark.parametrize("point", ["manifest", "rests"])
async def test_a_controller_that_stalls_while_it_saves_deletes_nothing_of_its_successor(
    make_world: Callable[..., Any], point: str
) -> None:
    store = OvertakenStore()
    run, _, _ = make_world(store).start()
    store.put(PREFIX + "000001/rest", b"")
    run.progress.cursor.phase, run.progress.cursor.global_step = "sft", 4
    store.point = point
    journal = asyncio.create_task(run.book.journal.run())
    async with asyncio.timeout(10):
        if point == "manifest":
            with pytest.raises(FencedError):
                await run.checkpoints.save_checkpoint("Scheduled")
        else:
            await run.checkpoints.save_checkpoint("Scheduled")
            assert PREFIX + "000001/rest" not in store.objects
    journal.cancel()
    await asyncio.gather(journal, return_exceptions=True)
    assert SUCCESSORS in store.objects

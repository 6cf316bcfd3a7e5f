"""A run whose store is full says so in the store's words, and goes on when there is room."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from typing_extensions import Buffer, override

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.errors import StoreError
from etude.common.weights import VersionId
from etude.common.weights.protocol.listing import take_listing
from etude.trainer.controller.program import train

MakeWorld = Callable[..., Any]

WORDS = "Unable to copy data to file: No space left on device (os error 28)"
"""As the client of a folder says it."""


class FullStore(MemoryStore):
    """Has no room for one version until there is some."""

    prefix = ""

    @override
    def put(self, key: str, data: Buffer) -> None:
        if self.prefix and key.startswith(self.prefix):
            raise StoreError(f"{self.url}/{key}: {WORDS}")
        super().put(key, data)


@pytest.mark.parametrize("number", [0, 3])
async def test_it_waits_with_the_version_before_and_loses_nothing(
    make_world: MakeWorld, uninterrupted: str, number: int
) -> None:
    store = FullStore()
    world = make_world(store)
    refused = VersionId(1, number)
    store.prefix = f"weights/deltas/{refused.epoch:06d}/{refused.number:012d}/"
    run, sets, checkpoint = world.start()
    status = run.reporter.status
    training = asyncio.create_task(train(run, sets, checkpoint=checkpoint))
    async with asyncio.timeout(30):
        while status.reason != "StorageUnavailable":
            await asyncio.sleep(0.01)
            run.reporter.update_status()
        assert WORDS in status.message
        assert not training.done(), "it waits: nothing is gained by starting again"
        newest = weights.newest_version(store)
        assert newest == (VersionId(1, number - 1) if number else None)
        assert refused not in take_listing(store).payloads
        store.prefix = ""
        assert await training
    assert (status.reason, status.message) == ("", "")
    assert world.digest == uninterrupted
    assert world.audit(max_staleness=0).findings == []

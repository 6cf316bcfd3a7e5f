"""Trajectory logs of earlier controllers stay until no group goes on from them."""

from collections.abc import Sequence

from typing_extensions import override

from etude.common.blobs import MemoryStore
from etude.common.errors import StoreError
from etude.trainer.controller.admission.old_trajectories import OldTrajectories

OLD, NEW = "trajectories/a/000001/000000000001.wal", "trajectories/b/000001/000000000001.wal"


def make_store() -> MemoryStore:
    store = MemoryStore()
    store.create(OLD, b"turns")
    return store


async def test_logs_are_deleted_once_their_last_group_is_trained() -> None:
    store = make_store()
    old = await OldTrajectories.find(store, ["g1", "g2"])
    store.create(NEW, b"turns")
    await old.delete_unneeded({"g2", "g3"})
    assert OLD in store.objects
    await old.delete_unneeded({"g3"})
    assert list(store.objects) == [NEW]


async def test_a_store_that_is_away_is_asked_again_after_the_next_step() -> None:
    class Away(MemoryStore):
        failures = 1

        @override
        def delete(self, keys: Sequence[str]) -> None:
            if self.failures:
                self.failures -= 1
                raise StoreError("away")
            MemoryStore.delete(self, keys)

    store = Away()
    store.create(OLD, b"turns")
    old = await OldTrajectories.find(store, [])
    await old.delete_unneeded(())
    assert OLD in store.objects
    await old.delete_unneeded(())
    assert not store.objects

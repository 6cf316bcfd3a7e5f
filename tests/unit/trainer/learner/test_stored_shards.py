"""Shards that ranks stored are found again by any other ranks, whatever either mesh was."""

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.trainer.earlier_checkpoints import rewrite_in_format_1
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from typing_extensions import Buffer, override

from etude.common.blobs import MemoryStore
from etude.common.errors import CorruptError, WrongStateError
from etude.common.weights.protocol import records
from etude.trainer.learner.checkpoint import reader
from etude.trainer.learner.checkpoint.index import read_indexes
from etude.trainer.learner.checkpoint.reader import read_shards, verify_blocks
from etude.trainer.learner.checkpoint.shard_memory import ShardMemory
from etude.trainer.learner.checkpoint.writer import StateWriter
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.parameters import local_shard

CPU = torch.device("cpu")
STATE = {"step": 3}


@dataclass(frozen=True)
class Mesh:
    """Ranks, and where they hold tensors of two dimensions."""

    shape: tuple[int, ...] = (1,)
    placements: tuple[Placement, ...] = (Replicate(),)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


def rows(count: int) -> Mesh:
    """As FSDP shards."""
    return Mesh((count,), (Shard(0),))


ALONE = Mesh()


@contextmanager
def rank_of(mesh: Mesh, rank: int) -> Iterator[None]:
    """This process as one rank of a group without peers."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def distribute(tensors: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """The tensors as this rank holds them; one of a single dimension is no DTensor."""
    devices = init_device_mesh("cpu", mesh.shape)
    return {
        name: tensor
        if tensor.ndim == 1
        else distribute_tensor(tensor, devices, mesh.placements, src_data_rank=None)
        for name, tensor in tensors.items()
    }


def save(
    store: MemoryStore, tensors: Mapping[str, Tensor], mesh: Mesh, *, part: int, block: int
) -> None:
    for rank in range(mesh.size):
        with rank_of(mesh, rank):
            ranks = RankGroup(rank=rank, size=mesh.size, device=CPU)
            writer = StateWriter(ranks, part_bytes=part, block_bytes=block)
            writer.copy_state("saved", distribute(tensors, mesh), dict(STATE))
            writer.write_copy(store, "saved")


def restore(store: MemoryStore, tensors: Mapping[str, Tensor], mesh: Mesh, rank: int) -> None:
    """Assert that a rank reads the very elements that torch gives it."""
    with rank_of(mesh, rank):
        expected = distribute(tensors, mesh)
        blank = distribute({n: torch.zeros_like(each) for n, each in tensors.items()}, mesh)
        saved = read_indexes(store, "saved")
        assert saved.state == STATE
        memory = ShardMemory.allocate(blank)
        read_shards(store, saved, memory, where="saved")
        memory.copy_to(blank)
        for name, tensor in expected.items():
            assert torch.equal(local_shard(blank[name]), local_shard(tensor)), name


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    placement = st.sampled_from([Replicate(), Shard(0), Shard(1)])
    return Mesh(shape, tuple(draw(placement) for _ in shape))


@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 7), st.integers(1, 5)),
    before=meshes(),
    after=meshes(),
    block=st.integers(1, 40),
    blocks=st.integers(1, 3),
)
def test_what_any_mesh_stored_any_other_mesh_reads(
    shape: tuple[int, int], before: Mesh, after: Mesh, block: int, blocks: int
) -> None:
    tensors = {
        "weight": torch.randn(shape),
        "moment": torch.randn(shape).to(torch.bfloat16),
        "rng": torch.arange(11, dtype=torch.uint8),
    }
    store = MemoryStore()
    save(store, tensors, before, part=block * blocks, block=block)
    stored = sum(
        shard.num_bytes
        for stream in read_indexes(store, "saved").streams
        for shard in stream.shards
    )
    assert stored == sum(tensor.nbytes for tensor in tensors.values()), "each element once"
    for rank in range(after.size):
        restore(store, tensors, after, rank)


@dataclass
class CountingStore(MemoryStore):
    """Notes which bytes of shards are read; a slow range may be asked for twice."""

    ranges: set[tuple[str, int, int]] = field(default_factory=set)

    @property
    def read(self) -> int:
        return sum(length for _, _, length in self.ranges)

    @override
    def view(self, key: str, start: int, length: int) -> memoryview:
        if not key.endswith(".json"):
            self.ranges.add((key, start, length))
        return MemoryStore.view(self, key, start, length)


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (3, 4), (2, 1)])
def test_a_rank_reads_its_own_elements_and_at_most_a_block_at_each_end_of_them(
    before: int, after: int
) -> None:
    store, block = CountingStore(), 64
    tensors = {"weight": torch.randn(96, 32), "moment": torch.randn(96, 32)}
    save(store, tensors, rows(before), part=16 * block, block=block)
    for rank in range(after):
        store.ranges.clear()
        restore(store, tensors, rows(after), rank)
        own = sum(tensor.nbytes for tensor in tensors.values()) // after
        # A shard of each tensor may come from the streams of two ranks or more.
        pieces = len(tensors) * (1 + -(-before // after))
        assert own <= store.read <= own + 2 * pieces * block


def test_a_damaged_block_is_named_and_harms_only_those_who_need_it() -> None:
    store, block = MemoryStore(), 64
    tensors = {"weight": torch.arange(64, dtype=torch.int64).reshape(16, 4)}
    save(store, tensors, rows(2), part=2 * block, block=block)
    key = "saved/00001-00001.bin"
    data = bytearray(store.get(key))
    data[70] ^= 1
    store.put(key, bytes(data))
    for rank in range(3):
        restore(store, tensors, rows(4), rank)
    words = r"saved/00001-00001\.bin: bytes 64 to 128 do not match their BLAKE3 digest"
    with pytest.raises(CorruptError, match=words):
        restore(store, tensors, rows(4), 3)
    with pytest.raises(CorruptError, match=words):
        verify_blocks(store, read_indexes(store, "saved"))


def test_files_of_an_earlier_release_are_read_in_bounded_ranges_whatever_their_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = CountingStore()
    tensors = {
        "weight": torch.randn(96, 32),
        "moment": torch.randn(48, 32),
        "rng": torch.arange(11, dtype=torch.uint8),
    }
    save(store, tensors, ALONE, part=1 << 20, block=64)
    rewrite_in_format_1(store, "saved")
    # Both files are several times longer than all ranges that are read at once.
    monkeypatch.setattr(reader, "READ_BYTES", 200)
    store.ranges.clear()
    for rank in range(3):
        restore(store, tensors, rows(3), rank)
    verify_blocks(store, read_indexes(store, "saved"))
    assert max(length for _, _, length in store.ranges) == 200
    key = next(info.key for info in store.list("saved/0001"))
    data = bytearray(store.get(key))
    data[-1] ^= 1
    store.put(key, bytes(data))
    with pytest.raises(CorruptError, match=rf"{key}: .* bytes do not match their BLAKE3 digest"):
        restore(store, tensors, rows(3), 0)
    store.put(key, bytes(data[:-1]))
    with pytest.raises(CorruptError, match=rf"{key}: {len(data) - 1} bytes, the index says"):
        restore(store, tensors, rows(3), 0)


def reseal(store: MemoryStore, rank: int, changes: dict[str, Any]) -> None:
    """Change an index as somebody who may write to the store can; a function gets the old value."""
    key = f"saved/{rank:05d}.json"
    index = records.unseal(store.get(key), where=key)
    for name, change in changes.items():
        index[name] = change(index[name]) if callable(change) else change
    store.put(key, records.seal(index))


def widen(shards: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row of the other rank too."""
    return [{**shards[0], "intervals": [[[0, 9]], [[0, 4]]]}]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shards": []}, "tensor 'weight' is not stored exactly once"),
        ({"shards": lambda old: [{**old[0], "intervals": [[[0, 7]], [[0, 4]]]}]}, "exactly once"),
        ({"shards": lambda old: [{**old[0], "intervals": [[[8, 16]], [[0, 4]]]}]}, "exactly once"),
        ({"shards": lambda old: [old[0], old[0]]}, "shards overlap, or end behind the stream"),
        ({"shards": widen}, "shards overlap, or end behind the stream"),
        ({"shards": lambda old: [{**old[0], "intervals": [[[0, 8]]]}]}, "1 dimensions"),
        ({"shards": lambda old: [{**old[0], "intervals": [[[0, 1 << 40]], [[0, 4]]]}]}, "16 ind"),
        ({"shards": lambda old: [{**old[0], "dtype": "pickle"}]}, "dtype"),
        ({"digests": []}, "0 digests of 256 bytes"),
        ({"block_bytes": 1 << 40, "part_bytes": 1 << 40}, "block_bytes"),
        ({"part_bytes": 100}, "a part is no number of blocks"),
        ({"ranks": 3}, r"00001\.json: is of another state than the index of rank 0"),
        ({"rank": 1}, r"00000\.json: is of another state"),
        ({"state": {"step": 4}}, r"00001\.json: is of another state"),
        ({"format": 3}, "format"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_an_index_that_contradicts_itself_or_another_is_refused(
    changes: dict[str, Any], words: str
) -> None:
    store = MemoryStore()
    tensors = {"weight": torch.arange(64, dtype=torch.int64).reshape(16, 4)}
    save(store, tensors, rows(2), part=128, block=64)
    reseal(store, 0, changes)
    if changes.get("ranks") == 3:
        store.put("saved/00002.json", store.get("saved/00001.json"))
    with pytest.raises(CorruptError, match=words):
        restore(store, tensors, ALONE, 0)


def test_a_rank_that_is_missing_is_named() -> None:
    store = MemoryStore()
    tensors = {"weight": torch.zeros(4, 4)}
    save(store, tensors, rows(2), part=128, block=64)
    store.delete(["saved/00001.json"])
    with pytest.raises(CorruptError, match=r"saved/00001\.json: missing"):
        restore(store, tensors, ALONE, 0)


def alone() -> StateWriter:
    return StateWriter(RankGroup(rank=0, size=1, device=CPU), part_bytes=64, block_bytes=64)


def test_a_copy_is_of_the_step_at_which_it_was_made_and_is_written_once() -> None:
    store, writer = MemoryStore(), alone()
    weight = torch.arange(12.0).reshape(3, 4)
    before = weight.clone()
    writer.copy_state("saved", {"weight": weight}, dict(STATE))
    weight += 1
    writer.write_copy(store, "saved")
    restore(store, {"weight": before}, ALONE, 0)
    with pytest.raises(WrongStateError, match="no state was copied"):
        writer.write_copy(store, "saved")


@dataclass
class SlowStore(MemoryStore):
    """Holds a write until it is told to go on."""

    has_begun: threading.Event = field(default_factory=threading.Event)
    may_go_on: threading.Event = field(default_factory=threading.Event)

    @override
    def put(self, key: str, data: Buffer) -> None:
        self.has_begun.set()
        assert self.may_go_on.wait(30)
        MemoryStore.put(self, key, data)


def test_a_newer_copy_replaces_one_that_is_still_being_written() -> None:
    store, writer = SlowStore(), alone()
    old, new = torch.zeros(64, 4), torch.ones(64, 4)
    writer.copy_state("old", {"weight": old}, dict(STATE))
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(writer.write_copy, store, "old")
        assert store.has_begun.wait(30)
        copying = pool.submit(writer.copy_state, "saved", {"weight": new}, dict(STATE))
        while not writer._is_replaced.is_set():
            time.sleep(0.001)
        store.may_go_on.set()
        copying.result(30)
        with pytest.raises(WrongStateError, match="a newer state is copied"):
            writing.result(30)
    assert "old/00000.json" not in store.objects
    writer.write_copy(store, "saved")
    restore(store, {"weight": new}, ALONE, 0)


def test_a_late_write_of_an_earlier_copy_takes_nothing_of_the_newest_one() -> None:
    store, writer = MemoryStore(), alone()
    old, new = torch.zeros(3, 4), torch.ones(3, 4)
    writer.copy_state("old", {"weight": old}, dict(STATE))
    writer.copy_state("saved", {"weight": new}, dict(STATE))
    with pytest.raises(WrongStateError, match="old is not written: the copy is saved's"):
        writer.write_copy(store, "old")
    writer.write_copy(store, "saved")
    restore(store, {"weight": new}, ALONE, 0)
    assert all(key.startswith("saved/") for key in store.objects)

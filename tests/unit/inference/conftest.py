"""A store with versions, an engine in memory, and a receiver between them."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.weights import FullManifest, Tensor, VersionId
from etude.inference.memory import MemoryEngine
from etude.inference.policy import EngineInfo
from etude.inference.receiver import Receiver
from etude.inference.staging import Stager
from etude.inference.status import Status

RUN = "uid-run"

Publish = Callable[..., FullManifest]


@pytest.fixture
def info() -> EngineInfo:
    return EngineInfo(model="tiny", vocab_size=100, max_model_len=32, max_concurrent=4)


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    weights.claim_epoch(store, holder="trainer-0", parent=None, reason="start")
    return store


@pytest.fixture
def publish(store: MemoryStore) -> Publish:
    def make(number: int, *, epoch: int = 1, run: str = RUN) -> FullManifest:
        tensor = Tensor(name="w", dtype="F32", shape=(1,), data=struct.pack("<f", number))
        return weights.publish(
            store,
            run=run,
            version=VersionId(epoch, number),
            step=number,
            holder="trainer-0",
            tensors=[tensor],
        )

    return make


@pytest.fixture
def engine(info: EngineInfo) -> MemoryEngine:
    return MemoryEngine(info)


@pytest.fixture
def receiver(store: MemoryStore, engine: MemoryEngine, tmp_path: Path) -> Receiver:
    return Receiver(
        stager=Stager(store, RUN, tmp_path),
        engine=engine,
        status=Status(replica="tiny-inference-0"),
    )

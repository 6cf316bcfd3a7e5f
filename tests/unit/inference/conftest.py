"""A store with versions, an engine in memory, and a receiver between them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.weights.followed_versions import SCHEMA
from tests.support.weights.publishing import TrainedPolicy

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.weights import WeightManifest
from etude.inference.engine.fake import MemoryEngine, MemoryRanks
from etude.inference.engine.interface import EngineInfo
from etude.inference.status import ReplicaStatus
from etude.inference.updates.follower import VersionFollower
from etude.inference.updates.staging import Stager

RUN = "uid-run"

Publish = Callable[..., WeightManifest]


@pytest.fixture
def info() -> EngineInfo:
    return EngineInfo(model="tiny", vocab_size=100, max_model_len=32, max_concurrent=4)


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    weights.claim_epoch(store, holder="trainer-0", parent=None, reason="start")
    return store


@pytest.fixture
def engine(info: EngineInfo) -> MemoryEngine:
    return MemoryEngine(info, MemoryRanks(2))


@pytest.fixture
def receiver(store: MemoryStore, engine: MemoryEngine, tmp_path: Path) -> VersionFollower:
    return VersionFollower(
        stager=Stager(store, RUN, tmp_path),
        engine=engine,
        status=ReplicaStatus(replica="tiny-inference-0"),
    )


@pytest.fixture
def policy() -> TrainedPolicy:
    return TrainedPolicy(SCHEMA)


@pytest.fixture
def publish(policy: TrainedPolicy, store: MemoryStore) -> Publish:
    """Publishes one more step, on the version before it unless told otherwise."""

    def make(number: int, **how: Any) -> WeightManifest:
        policy.step()
        return policy.publish(store, number, **how)

    return make


@pytest.fixture
def versions(policy: TrainedPolicy, store: MemoryStore) -> list[WeightManifest]:
    """A complete version and two deltas."""
    found = [policy.publish(store, 0, complete=True)]
    for number in (1, 2):
        policy.step()
        found.append(policy.publish(store, number))
    return found

"""A real learner whose versions wait in memory for a folder that is away, and beside its steps."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.stores.store_faults import Fault, FaultyStore, Schedule

from etude.common import weights
from etude.common.blobs import Store, open_store
from etude.common.errors import StoreError, WrongStateError
from etude.common.weights import VersionId
from etude.common.weights.protocol import publication
from etude.common.weights.protocol.manifest import WeightManifest
from etude.trainer.export import hf_folder
from etude.trainer.export.receipts import PublishBase, build_manifest
from etude.trainer.learner.batches import SupervisedSequence
from etude.trainer.learner.learner import Learner

Build = Callable[..., Learner]
Words = dict[str, bytes]

PHASE = {
    "name": "sft",
    "type": "SupervisedFineTuning",
    "maxSteps": 50,
    "optimizer": {"learningRate": "1e-5"},
    "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
}


def step(learner: Learner, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(0, 64, (4, 12)).astype(np.int32)
    learner.supervised_step(
        [SupervisedSequence(token_ids=row, weights=np.ones(12, np.float32)) for row in ids]
    )


class Ahead:
    """The controller's half, which encodes versions on others that are not committed."""

    def __init__(self, learner: Learner, faults: Schedule) -> None:
        self.learner = learner
        self.inner = learner._publisher._store
        self.store: Store = FaultyStore(self.inner, faults)
        learner._publisher._store = self.store
        self.base: PublishBase | None = None
        self.waiting: list[WeightManifest] = []
        self.expected: dict[VersionId, Words] = {}
        self.number = 0

    def encode(self) -> None:
        version = VersionId(1, self.number)
        self.number += 1
        manifest = build_manifest(
            [self.learner.encode(version, self.base)],
            run="uid",
            version=version,
            step=version.number,
            holder="test",
            base=self.base.ref if self.base else None,
        )
        self.base = PublishBase(manifest.ref, manifest.schema_sha256)
        self.waiting.append(manifest)
        sources = hf_folder.gather_sources(self.learner.policy)
        exported = hf_folder.convert_tensors(self.learner.policy, sources, dtype="BFloat16")
        self.expected[version] = {each.name: bytes(each.data) for each in exported.tensors}

    def bring_out(self) -> WeightManifest:
        """The oldest one, with the patience of a controller."""
        manifest = self.waiting[0]
        while True:
            try:
                self.learner.upload(manifest.version)
                publication.publish_manifest(self.store, manifest)
            except StoreError:
                continue
            return self.waiting.pop(0)

    def assert_all_read(self, reader: Any, committed: list[WeightManifest]) -> None:
        """A replica that follows the chain has the very words that the learner had."""
        for manifest in committed:
            reader.follow(manifest)
            found = {name: words.tobytes() for name, words in reader.tensor_words.items()}
            assert found == self.expected[manifest.version]
        assert weights.accepted_chain(self.inner) == [m.version for m in committed]


def test_versions_wait_for_a_folder_that_is_away_and_all_come_out_in_order(
    build: Build, store: Store, reader: Any
) -> None:
    faults = Schedule()
    learner = build(advanced={"backlog": 2})
    learner.start_phase(PHASE, 0)
    ahead = Ahead(learner, faults)
    ahead.encode()
    committed = [ahead.bring_out()]
    faults.down(is_down=True)
    for seed in range(3):
        step(learner, seed)
        ahead.encode()
        with pytest.raises(StoreError):
            learner.upload(ahead.waiting[0].version)
    step(learner, 3)
    with pytest.raises(WrongStateError, match="3 others wait for upload"):
        ahead.encode()
    assert [i.key for i in store.list("weights/manifests/")] == [VersionId(1, 0).manifest_key]
    faults.down(is_down=False)
    committed += [ahead.bring_out() for _ in range(3)]
    # The step that found no room is in the next version.
    ahead.number = 4
    ahead.encode()
    committed.append(ahead.bring_out())
    assert [m.is_complete for m in committed] == [True, False, False, False, False]
    ahead.assert_all_read(reader, committed)
    assert learner._publisher._waiting == {}


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**16))
def test_a_store_full_of_faults_changes_no_bit(
    build: Build, reader: Any, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    rates = {Fault.UNAVAILABLE: 0.2, Fault.LOST_REPLY: 0.2, Fault.RESET: 0.1}
    faults = Schedule(seed=seed, rates=rates, hits=lambda call, _key: call in {"put", "create"})
    chance = np.random.default_rng(seed)
    learner = build(advanced={"backlog": 2})
    folder = tmp_path_factory.mktemp("run")
    inner = open_store(f"file://{folder}/run")
    weights.claim_epoch(inner, holder="test", parent=None, reason="start")
    learner._publisher._store = inner
    learner.start_phase(PHASE, 0)
    ahead = Ahead(learner, faults)
    committed = []
    for number in range(6):
        if number:
            step(learner, number)
        ahead.encode()
        while len(ahead.waiting) > 2 or (ahead.waiting and chance.random() < 0.3):
            committed.append(ahead.bring_out())
    while ahead.waiting:
        committed.append(ahead.bring_out())
    ahead.assert_all_read(type(reader)(inner, folder), committed)


def test_an_upload_beside_a_step_stores_the_weights_before_it(
    build: Build, store: Store, reader: Any
) -> None:
    learner = build(advanced={"backlog": 1})
    learner.start_phase(PHASE, 0)
    ahead = Ahead(learner, Schedule())
    committed = []
    with ThreadPoolExecutor(1) as beside:
        for seed in range(4):
            ahead.encode()
            out = beside.submit(ahead.bring_out)
            step(learner, seed)
            committed.append(out.result())
    ahead.assert_all_read(reader, committed)


def test_a_chain_that_begins_anew_drops_what_waits(build: Build, store: Store, reader: Any) -> None:
    learner = build(advanced={"backlog": 2})
    learner.start_phase(PHASE, 0)
    ahead = Ahead(learner, Schedule())
    ahead.encode()
    committed = [ahead.bring_out()]
    for seed in range(2):
        step(learner, seed)
        ahead.encode()
    ahead.base, ahead.waiting = None, []
    ahead.encode()
    assert [*learner._publisher._waiting] == [VersionId(1, 3)]
    committed.append(ahead.bring_out())
    assert committed[1].is_complete
    ahead.assert_all_read(reader, committed)

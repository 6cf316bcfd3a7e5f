"""Versions that fail on the way lose nothing, and others are refused in time."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from etude.common import weights
from etude.common.blobs import Store
from etude.common.errors import StoreError
from etude.common.weights import VersionId
from etude.trainer.export.receipts import NonFiniteWeightsError, SchemaChangedError
from etude.trainer.learner.batches import SupervisedSequence
from etude.trainer.learner.learner import Learner

Build = Callable[..., Learner]


def phase(rate: str) -> dict[str, object]:
    return {
        "name": "sft",
        "type": "SupervisedFineTuning",
        "maxSteps": 50,
        "optimizer": {"learningRate": rate},
        "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
    }


def texts(seed: int) -> list[SupervisedSequence]:
    ids = np.random.default_rng(seed).integers(0, 64, (4, 12)).astype(np.int32)
    return [SupervisedSequence(token_ids=row, weights=np.ones(12, np.float32)) for row in ids]


class Refusing:
    """A store that is away for the first puts."""

    def __init__(self, store: Store, refusals: int) -> None:
        self._store = store
        self.refusals = refusals

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, data: bytes) -> None:
        if self.refusals:
            self.refusals -= 1
            raise StoreError("the store did not answer")
        self._store.put(key, data)


def test_an_upload_that_failed_is_repeated_with_the_same_bytes(
    build: Build, chain: Any, store: Store, reader: Any
) -> None:
    learner = build()
    learner.start_phase(phase("1e-5"), 0)
    reader.follow(chain.publish(learner))
    learner.supervised_step(texts(0))
    learner._publisher._store = Refusing(store, 2)  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(StoreError):
            chain.upload(learner)
    reader.follow(chain.publish(learner))
    reader.assert_equal(learner)


@pytest.mark.parametrize("more_steps", [0, 2])
def test_changes_of_a_version_that_was_never_committed_are_in_the_next(
    build: Build, chain: Any, reader: Any, more_steps: int
) -> None:
    """A controller that dies between payload and manifest, and one whose try is fenced off."""
    learner = build()
    learner.start_phase(phase("1e-5"), 0)
    reader.follow(chain.publish(learner))
    learner.supervised_step(texts(0))
    lost = chain.upload(learner)
    for seed in range(more_steps):
        learner.supervised_step(texts(seed + 1))
    chain.number = 2
    found = chain.publish(learner)
    assert found.base is not None
    assert found.base.number == 0
    assert lost.payload is not None
    assert lost.payload.key not in {item.key for item in found.objects}
    reader.follow(found)
    reader.assert_equal(learner)


def test_a_learner_that_is_told_of_a_strange_base_starts_a_chain(
    build: Build, chain: Any, reader: Any
) -> None:
    learner, other = build(), build()
    other.start_phase(phase("1e-3"), 0)
    other.supervised_step(texts(3))
    learner.start_phase(phase("1e-5"), 0)
    reader.follow(chain.publish(other))
    found = chain.publish(learner)
    assert found.is_complete
    reader.follow(found)
    reader.assert_equal(learner)


@pytest.mark.parametrize("is_published", [True, False])
def test_a_restored_learner_goes_on_from_the_version_of_its_weights(
    build: Build, chain: Any, store: Store, reader: Any, *, is_published: bool
) -> None:
    one = build()
    one.start_phase(phase("1e-5"), 0)
    reader.follow(chain.publish(one))
    one.supervised_step(texts(0))
    if is_published:
        reader.follow(chain.publish(one))
    one.copy_state("checkpoints/1/learner")
    one.save("checkpoints/1/learner")
    parent = VersionId(1, chain.number - 1)
    weights.claim_epoch(store, holder="test", parent=parent, reason="takeover")
    other = build()
    other.restore("checkpoints/1/learner")
    chain.epoch = 2
    other.supervised_step(texts(1))
    found = chain.publish(other)
    # Without the version of the restored weights there is nothing that changes could build on.
    assert found.is_complete != is_published
    reader.follow(found)
    reader.assert_equal(other)


def test_weights_that_are_no_numbers_are_not_published(
    build: Build, chain: Any, store: Store, reader: Any
) -> None:
    learner = build()
    learner.start_phase(phase("1e-5"), 0)
    reader.follow(chain.publish(learner))
    learner.supervised_step(texts(0))
    before = [info.key for info in store.list("weights/")]
    norm = learner.policy.model.get_parameter("model.norm.weight")
    kept = norm.detach().clone()
    with learner._publisher.observe_step("model.model.norm.weight", norm), torch.no_grad():
        norm[3] = torch.nan
    with pytest.raises(NonFiniteWeightsError, match=r"version 1\.1 .* 1 weights are NaN"):
        chain.publish(learner)
    assert [info.key for info in store.list("weights/")] == before
    with learner._publisher.observe_step("model.model.norm.weight", norm), torch.no_grad():
        norm.copy_(kept)
    reader.follow(chain.publish(learner))
    reader.assert_equal(learner)


def test_numbers_that_are_none_are_published_if_that_is_wanted(
    build: Build, chain: Any, reader: Any
) -> None:
    learner = build(advanced={"allowNonFinite": True})
    with torch.no_grad():
        learner.policy.model.get_parameter("model.norm.weight")[3] = torch.inf
    manifest = chain.publish(learner)
    assert manifest.stats.nonfinite == 1
    reader.follow(manifest)
    reader.assert_equal(learner)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"dtype": "Float32"}, r"tensor 'model\.embed_tokens\.weight' was BF16\[64, 32\], is F32"),
        ({"advanced": {"tileGrid": 4}}, "tile grid 8 became 4"),
    ],
)
def test_a_change_of_the_schema_is_refused_before_anything_is_uploaded(
    build: Build, chain: Any, store: Store, changed: dict[str, Any], what: str
) -> None:
    chain.publish(build())
    before = [info.key for info in store.list("weights/")]
    with pytest.raises(SchemaChangedError, match=what):
        build(**changed).encode(VersionId(1, 1), chain.base)
    assert [info.key for info in store.list("weights/")] == before

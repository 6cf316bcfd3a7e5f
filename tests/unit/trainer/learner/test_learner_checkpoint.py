"""What a learner leaves in the store, and what it accepts back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.trainer.earlier_checkpoints import rewrite_in_format_1

from etude.common.api.run.roles import Lora
from etude.common.api.storage import Storage
from etude.common.blobs import Store, open_store
from etude.common.errors import CorruptError, UserError, WrongStateError
from etude.trainer.learner.batches import PolicyBatch, PolicySequence, SupervisedSequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.learner import Learner

MODEL = Path(__file__).parents[3] / "data" / "tiny-model"
SFT = {
    "name": "sft",
    "type": "SupervisedFineTuning",
    "maxSteps": 50,
    "optimizer": {"learningRate": "1e-2", "schedule": "Linear", "warmupSteps": 3},
    "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
}
RL = {
    "name": "rl",
    "type": "ReinforcementLearning",
    "maxSteps": 50,
    "optimizer": {"learningRate": "1e-2"},
    "tasks": [{"name": "train", "uri": "file:///tasks", "environment": "repos"}],
    "algorithm": {"parameters": {"lossScale": 8, "klCoefficient": 0.1}},
}

LORA = Lora(rank=4)

Build = Callable[..., Learner]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}/run")


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def make(**settings: Any) -> Learner:
        given: dict[str, Any] = {
            "run": "uid",
            "holder": "test",
            "model_folder": MODEL,
            "storage": Storage(uri=f"file://{tmp_path}/run"),
        }
        return Learner(LearnerConfig(**{**given, **settings}))

    return make


def texts(seed: int) -> list[SupervisedSequence]:
    ids = np.random.default_rng(seed).integers(0, 64, (4, 12)).astype(np.int32)
    return [SupervisedSequence(token_ids=row, weights=np.ones(12, np.float32)) for row in ids]


def rollouts(seed: int) -> PolicyBatch:
    rng = np.random.default_rng(seed)
    mask = np.arange(12) > 5
    sequences = tuple(
        PolicySequence(
            token_ids=rng.integers(0, 64, 12).astype(np.int32),
            loss_mask=mask,
            sampler_logprobs=np.full(12, -4, np.float32),
            rollout=rollout,
        )
        for rollout in range(4)
    )
    return PolicyBatch(
        sequences=sequences,
        rewards=rng.random(4),
        groups=np.zeros(4, dtype=np.int64),
        valid=np.ones(4, dtype=np.bool_),
    )


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "adapters"])
def test_a_restored_supervised_phase_goes_on_bit_for_bit(build: Build, lora: Lora | None) -> None:
    one = build(lora=lora)
    one.start_phase(SFT, 0)
    for seed in range(4):
        one.supervised_step(texts(seed))
    one.copy_state("checkpoints/4/learner")
    one.save("checkpoints/4/learner")
    expected = [one.supervised_step(texts(seed)) for seed in (4, 5)]
    other = build(seed=99, lora=lora)
    assert other.restore("checkpoints/4/learner") == ("sft", 4)
    found = [other.supervised_step(texts(seed)) for seed in (4, 5)]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.loss, ours.grad_norm, ours.learning_rate, ours.weight_digest) == (
            theirs.loss,
            theirs.grad_norm,
            theirs.learning_rate,
            theirs.weight_digest,
        )


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "adapters"])
def test_a_restored_policy_phase_keeps_its_reference(build: Build, lora: Lora | None) -> None:
    one = build(lora=lora)
    one.start_phase(RL, 0)
    one.policy_step(rollouts(0))
    one.copy_state("checkpoints/1/learner")
    one.save("checkpoints/1/learner")
    expected = one.policy_step(rollouts(1))
    other = build(lora=lora)
    other.restore("checkpoints/1/learner")
    # The controller may announce the phase again, say with more steps: nothing starts afresh.
    other.start_phase({**RL, "maxSteps": 80}, 1)
    found = other.policy_step(rollouts(1))
    assert found.weight_digest == expected.weight_digest
    assert found.extra["reference_kl"] == expected.extra["reference_kl"] != 0


def test_other_adapters_than_those_of_the_checkpoint_are_refused(build: Build) -> None:
    one = build(lora=LORA)
    one.start_phase(SFT, 0)
    one.copy_state("checkpoints/0/learner")
    one.save("checkpoints/0/learner")
    for lora, now in ((None, "the run no adapters"), (Lora(rank=8), "'rank': 8")):
        other = build(lora=lora)
        before = other.digest()
        with pytest.raises(UserError, match=r"the checkpoint has adapters .*'rank': 4") as caught:
            other.restore("checkpoints/0/learner")
        assert now in caught.value.problem.what
        assert other.digest() == before


def test_a_divergence_from_weights_that_were_not_kept_is_refused(build: Build) -> None:
    one = build()
    one.start_phase({**RL, "algorithm": {}}, 0)
    one.policy_step(rollouts(0))
    with pytest.raises(WrongStateError, match="klCoefficient cannot be switched on after 1 steps"):
        one.start_phase(RL, 1)


def test_a_new_phase_starts_its_optimiser_afresh(build: Build) -> None:
    fresh, carried = build(), build()
    carried.start_phase(SFT, 0)
    carried.supervised_step(texts(0))
    carried.copy_state("checkpoints/1/learner")
    carried.save("checkpoints/1/learner")
    fresh.restore("checkpoints/1/learner")
    second = {**SFT, "name": "sft-2"}
    fresh.start_phase(second, 0)
    carried.start_phase(second, 0)
    assert (
        fresh.supervised_step(texts(1)).weight_digest
        == carried.supervised_step(texts(1)).weight_digest
    )


def test_a_checkpoint_before_the_first_step_can_be_restored(build: Build) -> None:
    one = build(seed=3)
    one.start_phase(SFT, 0)
    one.copy_state("checkpoints/0/learner")
    one.save("checkpoints/0/learner")
    other = build(seed=4)
    other.restore("checkpoints/0/learner")
    assert other.digest() == one.digest()
    assert (
        other.supervised_step(texts(0)).weight_digest == one.supervised_step(texts(0)).weight_digest
    )


def test_a_checkpoint_names_every_object_with_its_size(build: Build, store: Store) -> None:
    learner = build()
    learner.start_phase(SFT, 0)
    learner.copy_state("checkpoints/0/learner")
    written = learner.save("checkpoints/0/learner")
    found = store.list("checkpoints/0/learner/")
    assert sorted((o.key, o.size) for o in written) == [(o.key, o.size) for o in found]
    assert written[-1].key == "checkpoints/0/learner/00000.json"


def part_of(store: Store, prefix: str) -> str:
    return next(o.key for o in store.list(prefix) if o.key.endswith(".bin"))


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (flip, r"(do not match their|does not match its|no JSON)"),
        (lambda data: data[:-1], r"(shorter than its index|no JSON|no sealed)"),
        (lambda _: b"", r"(shorter than its index|no JSON|no sealed)"),
        (lambda _: None, "missing"),
    ],
)
@pytest.mark.parametrize("target", ["index", "part"])
def test_a_damaged_checkpoint_is_refused_by_object_and_nothing_changes(
    build: Build,
    store: Store,
    target: str,
    damage: Callable[[bytes], bytes | None],
    what: str,
) -> None:
    learner = build()
    learner.start_phase(SFT, 0)
    learner.copy_state("good")
    learner.save("good")
    key = "good/00000.json" if target == "index" else part_of(store, "good/")
    data = damage(store.get(key))
    store.delete([key])
    if data is not None:
        store.put(key, data)
    learner.supervised_step(texts(0))
    before = learner.digest()
    with pytest.raises(CorruptError, match=rf"{key}.*{what}"):
        learner.restore("good")
    assert learner.digest() == before
    learner.supervised_step(texts(1))


def test_a_checkpoint_of_an_earlier_release_is_restored_and_its_damage_named(
    build: Build, store: Store
) -> None:
    one = build()
    one.start_phase(RL, 0)
    one.policy_step(rollouts(0))
    one.copy_state("old")
    one.save("old")
    rewrite_in_format_1(store, "old")
    other = build(seed=99)
    assert other.restore("old") == ("rl", 1)
    assert other.policy_step(rollouts(1)).weight_digest == (
        one.policy_step(rollouts(1)).weight_digest
    )
    key = next(info.key for info in store.list("old/0001"))
    store.put(key, flip(store.get(key)))
    with pytest.raises(CorruptError, match=rf"{key}.* do not match their BLAKE3 digest"):
        other.restore("old")


def test_a_checkpoint_of_another_model_is_refused(build: Build, tmp_path: Path) -> None:
    learner = build()
    learner.start_phase(SFT, 0)
    learner.copy_state("good")
    learner.save("good")
    config = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    other = build(model_folder=tmp_path / "wide")
    before = other.digest()
    with pytest.raises(CorruptError, match=r"tensor 'model\..*mlp.* is torch.float32\["):
        other.restore("good")
    assert other.digest() == before


def test_a_learner_without_a_phase_has_nothing_to_save(build: Build) -> None:
    with pytest.raises(WrongStateError, match="no phase was started"):
        build().copy_state("checkpoints/1/learner")

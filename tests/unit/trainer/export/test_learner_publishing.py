"""What a learner publishes, as a reader of the store finds it."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.common.blobs import Store
from etude.trainer.export import publisher
from etude.trainer.export.change_tracker import ChangeTracker
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


@pytest.mark.parametrize("dtype", ["BFloat16", "Float32"])
@pytest.mark.parametrize("rate", ["1e-5", "1e-2"])
def test_a_reader_of_deltas_has_the_learners_bits_at_every_version(
    build: Build, chain: Any, reader: Any, dtype: str, rate: str
) -> None:
    learner = build(dtype=dtype)
    learner.start_phase(phase(rate), 0)
    for number, steps in enumerate((0, 1, 3, 0, 1)):
        for step in range(steps):
            learner.supervised_step(texts(10 * number + step))
        manifest = chain.publish(learner)
        reader.follow(manifest)
        reader.assert_equal(learner)
        assert manifest.stats.elements == sum(words.size for words in reader.tensor_words.values())


def test_few_changes_are_sent_as_changes_and_none_as_nothing(
    build: Build, chain: Any, reader: Any
) -> None:
    learner = build()
    learner.start_phase(phase("1e-6"), 0)
    whole = chain.publish(learner)
    learner.supervised_step(texts(0))
    delta = chain.publish(learner)
    same = chain.publish(learner)
    assert whole.is_complete
    assert delta.base == whole.ref
    assert 0 < delta.stats.changed < delta.stats.elements / 4
    assert delta.num_bytes < whole.num_bytes / 4
    assert (same.state, same.objects) == (delta.state, ())
    reader.follow(same)
    reader.assert_equal(learner)
    assert reader.kinds == ["complete", "delta", "delta"]


def test_weights_that_all_changed_are_moved_from_the_version_before(
    build: Build, chain: Any, reader: Any
) -> None:
    learner = build(dtype="Float32")
    learner.start_phase(phase("1e-4"), 0)
    reader.follow(chain.publish(learner))
    for seed in range(2):
        learner.supervised_step(texts(seed))
        found = chain.publish(learner)
        assert not found.is_complete
        assert found.stats.changed > 0.99 * found.stats.elements
        assert found.num_bytes < 0.7 * 4 * found.stats.elements + 4096
        reader.follow(found)
        reader.assert_equal(learner)


def test_weights_that_all_changed_and_are_too_many_to_be_kept_need_no_earlier_version(
    build: Build, chain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "ChangeTracker", partial(ChangeTracker, most_kept_bytes=0))
    learner = build(dtype="Float32")
    learner.start_phase(phase("1e-2"), 0)
    chain.publish(learner)
    learner.supervised_step(texts(0))
    found = chain.publish(learner)
    assert found.is_complete
    assert found.num_bytes < 1.01 * 4 * found.stats.elements + 4096


@pytest.mark.parametrize("encoding", ["Auto", "Delta", "Full"])
def test_full_encoding_sends_everything_each_time_and_the_others_what_changed(
    build: Build, chain: Any, reader: Any, encoding: str
) -> None:
    learner = build(encoding=encoding)
    learner.start_phase(phase("1e-6"), 0)
    reader.follow(chain.publish(learner))
    for seed in range(2):
        learner.supervised_step(texts(seed))
        found = chain.publish(learner)
        assert found.is_complete == (encoding == "Full")
        assert (found.stats.changed == found.stats.elements) == (encoding == "Full")
        assert (found.stats.codecs.keys() == {"DENSE"}) == (encoding == "Full")
        reader.follow(found)
        reader.assert_equal(learner)


@pytest.mark.parametrize(("codec", "name"), [("L1", "L1"), ("L2", "L2"), ("L2r", "L2R")])
def test_changes_are_coded_as_the_run_has_it(
    build: Build, chain: Any, reader: Any, codec: str, name: str
) -> None:
    learner = build(advanced={"codec": codec})
    learner.start_phase(phase("1e-6"), 0)
    reader.follow(chain.publish(learner))
    learner.supervised_step(texts(0))
    found = chain.publish(learner)
    assert found.stats.codecs.keys() & {"L1", "L2", "L2R"} == {name}
    reader.follow(found)
    reader.assert_equal(learner)


@pytest.mark.parametrize("grid", [1, 4])
def test_tiles_are_cut_for_the_grid_that_the_run_has(build: Build, grid: int) -> None:
    assert build(advanced={"tileGrid": grid})._publisher._get_packer().schema.grid == grid


def test_publishing_again_gives_the_same_bytes(build: Build, chain: Any, store: Store) -> None:
    learner = build()
    learner.start_phase(phase("1e-5"), 0)
    chain.publish(learner)
    learner.supervised_step(texts(0))
    first = chain.upload(learner)
    objects = {info.key: store.get(info.key) for info in store.list("weights/deltas/")}
    assert chain.upload(learner) == first
    assert {info.key: store.get(info.key) for info in store.list("weights/deltas/")} == objects
    chain.commit(first)


def test_fused_experts_and_untrained_buffers_travel_in_the_checkpoints_layout(
    build: Build, chain: Any, reader: Any, experts: Path
) -> None:
    learner = build(model=experts)
    # A buffer that the checkpoint has, and that nobody trains.
    learner.policy.model.register_buffer("scale", torch.ones(5))
    learner.start_phase(phase("1e-5"), 0)
    found = []
    for seed in range(3):
        found.append(chain.publish(learner))
        reader.follow(found[-1])
        reader.assert_equal(learner)
        learner.supervised_step(texts(seed))
        learner.policy.model.get_buffer("scale").mul_(0.5 + seed)
    assert [manifest.is_complete for manifest in found] == [True, False, False]
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in reader.tensor_words


def test_tensors_that_the_checkpoints_layout_scatters_are_sent_whole(
    build: Build,
    chain: Any,
    reader: Any,
    experts: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("etude.trainer.model.checkpoint_layout._covers_all", lambda *_: False)
    learner = build(model=experts)
    learner.start_phase(phase("1e-6"), 0)
    reader.follow(chain.publish(learner))
    before = {name: words.copy() for name, words in reader.tensor_words.items()}
    learner.supervised_step(texts(0))
    delta = chain.publish(learner)
    reader.follow(delta)
    reader.assert_equal(learner)
    # A step this small may leave every bit of a tensor as it was: then there is nothing to send.
    changed = [
        name
        for name, words in reader.tensor_words.items()
        if ".experts." in name and (words != before[name]).any()
    ]
    assert changed
    assert delta.stats.codecs["DENSE"] >= len(changed)
    assert delta.stats.codecs["L1"] > 0


def test_uploads_over_a_slow_link_are_coded_small(
    build: Build, chain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.trainer.export.codec_choice.LEAST_BYTES", 1)
    learner = build()
    learner.start_phase(phase("1e-5"), 0)
    ticks = itertools.count()
    monkeypatch.setattr(learner._publisher, "_clock", lambda: float(next(ticks)))
    codecs = [set(chain.publish(learner).stats.codecs)]
    for seed in range(2):
        learner.supervised_step(texts(seed))
        codecs.append(set(chain.publish(learner).stats.codecs))
    assert "L2R" not in codecs[0]
    assert "L2R" in codecs[1] & codecs[2]


def test_a_run_that_never_published_pays_nothing(build: Build) -> None:
    learner = build()
    learner.start_phase(phase("1e-5"), 0)
    learner.supervised_step(texts(0))
    assert learner._publisher._share is None
    assert not learner._publisher.is_following

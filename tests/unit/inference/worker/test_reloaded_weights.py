"""Where no map reaches the parameters, changed tensors go through the loader, exactly as well."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.weights.publishing import TrainedPolicy
from torch import Tensor, nn

from etude.common.errors import CorruptError
from etude.common.weights.replicas.live_weights import LiveWeights
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.common.weights.tensors.words import Words
from etude.inference.worker.coverage import ComputedParameterError, assign_counted, region_rows
from etude.inference.worker.extension import open_live
from etude.inference.worker.rank import Rank
from etude.inference.worker.reloaded_weights import ReloadedWeights

SCHEMA = Schema(
    grid=1,
    tensors=(
        TensorSpec(name="a_log", dtype="F32", shape=(5,), split="rows"),
        TensorSpec(name="plain.weight", dtype="F32", shape=(4, 6), split="rows"),
    ),
)


class Decaying(nn.Module):
    """Keeps minus the exponential of what a checkpoint says, as state-space models do."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.zeros(5))
        self.plain = nn.Linear(6, 4, bias=False)
        self.loaded: list[str] = []

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.loaded.append(name)
            if name == "a_log":
                self.decay.copy_(-tensor.exp())
            else:
                self.get_parameter(name).copy_(tensor)


def floats(words: Words) -> Tensor:
    return torch.from_numpy(words.view(np.float32).copy())


def assert_computes(model: Decaying, policy: TrainedPolicy) -> None:
    assert torch.equal(model.decay, -floats(policy.words["a_log"]).exp())
    assert torch.equal(model.plain.weight.flatten(), floats(policy.words["plain.weight"]))


@pytest.fixture
def policy() -> TrainedPolicy:
    drawn = np.random.default_rng(1).standard_normal(24).astype(np.float32)
    return TrainedPolicy(
        SCHEMA, {"a_log": drawn[:5].view("<u4"), "plain.weight": drawn.view("<u4")}
    )


def served(rank: Rank, policy: TrainedPolicy, path: Path, *, keep_old: bool) -> None:
    rank.prepare(str(path), keep_old)
    while (answer := rank.poll_prepared()) is None:
        continue
    assert answer["error"] == ""
    assert rank.activate()
    assert rank.scan() == policy.state().hex()


def test_every_version_computes_as_if_freshly_loaded_and_is_undone(
    policy: TrainedPolicy, tmp_path: Path
) -> None:
    model = Decaying()
    rank = Rank(
        lambda schema, loads: open_live(model, model.load_weights, schema, uses_loader=loads)
    )
    assert rank.build_map(SCHEMA.to_bytes(), SCHEMA.sha256, uses_loader=True)["error"] == ""
    policy.stage(tmp_path / "0", None)
    served(rank, policy, tmp_path / "0", keep_old=False)
    assert_computes(model, policy)
    for number in range(1, 6):
        old = TrainedPolicy(SCHEMA, policy.words)
        policy.step(0.3)
        policy.stage(tmp_path / str(number), old.words)
        served(rank, policy, tmp_path / str(number), keep_old=True)
        assert_computes(model, policy)
        assert rank.undo()
        assert_computes(model, old)
        assert rank.activate()
        assert_computes(model, policy)


def test_a_model_that_computes_is_refused_where_loading_is_not_wanted() -> None:
    model = Decaying()
    live = open_live(model, model.load_weights, SCHEMA, uses_loader=False)
    with pytest.raises(ComputedParameterError, match="a_log"):
        assign_counted(SCHEMA, [region_rows(live.regions)])


def test_only_tensors_that_changed_are_loaded(policy: TrainedPolicy, tmp_path: Path) -> None:
    model = Decaying()
    live = ReloadedWeights(model, model.load_weights, SCHEMA, counts=True)
    old = TrainedPolicy(SCHEMA, policy.words)
    live.write(live.prepare(policy.blocks(None)))
    policy.words["a_log"][2] += 1
    model.loaded.clear()
    live.write(live.prepare(policy.blocks(old.words)))
    assert model.loaded == ["a_log"]


def test_a_model_that_copies_its_tensors_is_written_in_place() -> None:
    model = nn.Linear(6, 4, bias=False)

    def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in tensors:
            model.weight.data.copy_(tensor)

    schema = Schema(grid=1, tensors=SCHEMA.tensors[1:])
    live = open_live(model, load, schema, uses_loader=False)
    assert type(live) is LiveWeights


def test_a_parameter_that_no_tensor_fills_is_refused_here_too() -> None:
    model = Decaying()
    schema = Schema(grid=1, tensors=SCHEMA.tensors[:1])
    with pytest.raises(CorruptError, match=r"plain\.weight.* unfilled"):
        ReloadedWeights(model, model.load_weights, schema, counts=True)


def test_versions_in_another_format_than_the_engines_are_refused_here_too() -> None:
    model = Decaying()
    spec = SCHEMA.tensors[0].model_copy(update={"dtype": "BF16"})
    with pytest.raises(CorruptError, match=r"is BF16.*spec\.weights\.dtype"):
        ReloadedWeights(model, model.load_weights, Schema(grid=1, tensors=(spec,)), counts=True)

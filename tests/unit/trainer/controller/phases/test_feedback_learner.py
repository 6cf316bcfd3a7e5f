"""Phase Feedback with a real learner: a window of a model's own samples, through the controller."""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from tests.support.trainer.production_windows import store_rollout, write_window
from typing_extensions import override

from etude.common.api.run.phases import Phase
from etude.common.api.run.weights import Weights
from etude.common.api.storage import Storage
from etude.common.blobs import open_store
from etude.common.checkpoints.manifest import CheckpointObject
from etude.common.weights import VersionId
from etude.trainer.controller.phases import feedback
from etude.trainer.controller.program import train
from etude.trainer.controller.run import root_cause
from etude.trainer.export.receipts import PublishBase, RankReceipt
from etude.trainer.learner.batches import PolicyBatch, StepResult
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.protocol import Learners
from etude.trainer.learner.rank import LearnerRank
from etude.trainer.model.policy import Policy, load_policy
from etude.v1 import rollout_pb2, weights_pb2

MakeWorld = Callable[..., Any]
MODEL = Path(__file__).parents[4] / "data" / "tiny-model"
BASE = VersionId(1, 0)
PROMPT = [3, 1, 4]
GOOD = 32
"""The reward is the share of sampled ids below it, of 64."""

T = TypeVar("T")


@dataclass(slots=True)
class OneLearner(Learners):
    """A learner rank in threads of this process."""

    config: LearnerConfig
    steps_left: int = 1_000
    rank: LearnerRank = field(init=False)

    def __post_init__(self) -> None:
        self.rank = LearnerRank(self.config)
        self.rank.load()

    @override
    async def start_phase(self, phase: Phase, step: int, data_cursor: str = "") -> None:
        await asyncio.to_thread(self.rank.start_phase, phase.to_json(), step, data_cursor)

    @override
    async def supervised_step(self, step: int) -> StepResult:
        return await asyncio.to_thread(self.rank.supervised_step, step)

    @override
    async def held_out_losses(self) -> Mapping[str, float]:
        return await asyncio.to_thread(self.rank.held_out_losses)

    @override
    async def policy_step(self, batch: PolicyBatch) -> StepResult:
        if not self.steps_left:
            raise ConnectionError("killed")
        self.steps_left -= 1
        return await asyncio.to_thread(self.rank.policy_step, batch)

    @override
    async def measure_divergence(self, batch: PolicyBatch) -> float:
        return await asyncio.to_thread(self.rank.measure_divergence, batch)

    @override
    async def encode(self, version: VersionId, base: PublishBase | None) -> list[RankReceipt]:
        return [await asyncio.to_thread(self.rank.encode, version, base)]

    @override
    async def upload(self, version: VersionId) -> None:
        await asyncio.to_thread(self.rank.upload, version)

    @override
    async def copy_state(self, prefix: str) -> None:
        await asyncio.to_thread(self.rank.copy_state, prefix)

    @override
    async def save(self, prefix: str) -> list[CheckpointObject]:
        return await asyncio.to_thread(self.rank.save, prefix)

    @override
    async def restore(self, prefix: str) -> None:
        await asyncio.to_thread(self.rank.restore, prefix)

    @override
    async def export(self, prefix: str) -> list[CheckpointObject]:
        return await asyncio.to_thread(self.rank.export, prefix)


def sample(policy: Policy, draw: random.Random, *, length: int = 8) -> rollout_pb2.Rollout:
    """Sample a rollout from a policy, with the log-probs of its draws."""
    ids, logprobs = list(PROMPT), [0.0] * len(PROMPT)
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    for _ in range(length):
        with torch.no_grad():
            scores = policy.model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        token = int(torch.multinomial(scores.exp(), 1, generator=generator))
        ids.append(token)
        logprobs.append(float(scores[token]))
    version = BASE.to_proto()
    span = weights_pb2.PolicySpan(
        sampled=version, context=version, start=len(PROMPT), end=len(ids), replica="engine-0"
    )
    link = rollout_pb2.Link(
        token_ids=ids,
        loss_mask=bytes(len(PROMPT)) + b"\x01" * length,
        sampler_logprobs=logprobs,
        spans=[span],
    )
    name = f"{draw.getrandbits(128):032x}"
    return rollout_pb2.Rollout(rollout_id=name, links=[link], oldest=version, newest=version)


def reward_of(rollout: rollout_pb2.Rollout) -> float:
    sampled = rollout.links[0].token_ids[len(PROMPT) :]
    return sum(token < GOOD for token in sampled) / len(sampled)


def share_of_good(policy: Policy) -> float:
    """Probability that the first sampled token is a good one."""
    with torch.no_grad():
        scores = policy.model(input_ids=torch.tensor([PROMPT])).logits[0, -1].softmax(-1)
    return float(scores[:GOOD].sum())


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "POLL_S", 0.01)
    torch.set_num_threads(1)


def write_samples(folder: Path) -> None:
    """A window of what the initial weights sample, rewarded and compared."""
    store, draw, policy = open_store(folder.as_uri()), random.Random(0), load_policy(MODEL, seed=0)
    rollouts = [sample(policy, draw) for _ in range(48)]
    rewards = np.array([reward_of(each) for each in rollouts])
    entries = [
        store_rollout(
            store, each, user=f"{place:032x}", reward=reward, advantage=reward - rewards.mean()
        )
        for place, (each, reward) in enumerate(zip(rollouts, rewards.tolist(), strict=True))
    ]
    write_window(store, 1, BASE, entries=entries)


def spec_of(folder: Path, run: Path) -> dict[str, Any]:
    return {
        "model": {"uri": MODEL.as_uri()},
        "storage": {"uri": run.as_uri()},
        "weights": {"dtype": "Float32"},
        "phases": [
            {
                "name": "users",
                "type": "Feedback",
                "maxSteps": 3,
                "optimizer": {"learningRate": "5e-3"},
                "algorithm": {"parameters": {"lossScale": 8}},
                "feedback": {
                    "uri": folder.as_uri(),
                    "minRollouts": 8,
                    "stepsPerWindow": 3,
                    "klBudget": "1",
                },
            }
        ],
        "roles": {},
    }


async def run_phase(make_world: MakeWorld, spec: dict[str, Any], *, steps_left: int) -> Any:
    """Run a controller with a learner of its own; return both."""
    storage = Storage.model_validate(spec["storage"])
    world = make_world(open_store(storage.uri), given=spec)
    run, sets, checkpoint = world.start()
    weights = Weights.model_validate(spec["weights"])
    learners = OneLearner(
        LearnerConfig(
            run="run", holder="test", model_folder=MODEL, storage=storage, weights=weights
        ),
        steps_left,
    )
    run.learners = run.publishing.learners = run.checkpoints.saver.learners = learners
    async with asyncio.timeout(120):
        await train(run, sets, checkpoint=checkpoint)
    return world, learners


async def test_a_window_moves_the_policy_towards_its_rewards_also_over_a_crash(
    make_world: MakeWorld, tmp_path: Path
) -> None:
    folder = tmp_path / "feedback"
    await asyncio.to_thread(write_samples, folder)
    spec = spec_of(folder, tmp_path / "whole")
    world, learners = await run_phase(make_world, spec, steps_left=9)
    first, *later = world.rows("step")
    assert first["mismatch_current"] < 1e-5  # the recorded log-probs are those of the weights
    assert first["kl"] == pytest.approx(0, abs=1e-9)
    assert 0 < later[0]["kl"] < later[1]["kl"]
    [window] = world.rows("window")
    assert (window["trained"], window["steps"], window["ended_by"]) == (48, 3, "")
    policy = learners.rank._learner.policy
    assert share_of_good(policy) > share_of_good(load_policy(MODEL, seed=0)) + 0.02

    cut = spec_of(folder, tmp_path / "cut")
    with pytest.raises(ExceptionGroup) as caught:
        await run_phase(make_world, cut, steps_left=1)
    assert isinstance(root_cause(caught.value), ConnectionError)
    again, _ = await run_phase(make_world, cut, steps_left=9)
    assert again.rows("step")[-1]["weight_digest"] == later[-1]["weight_digest"]

"""Phase Feedback with a real learner: a window of a model's own samples, through the controller."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.trainer.one_learner import MODEL, PROMPT, run_controller, sample
from tests.support.trainer.production_windows import store_rollout, write_window

from etude.common.blobs import open_store
from etude.common.weights import VersionId
from etude.trainer.controller.phases import feedback
from etude.trainer.controller.run import root_cause
from etude.trainer.model.policy import Policy, load_policy
from etude.v1 import rollout_pb2

MakeWorld = Callable[..., Any]
BASE = VersionId(1, 0)
GOOD = 32
"""The reward is the share of sampled ids below it, of 64."""


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
    rollouts = [sample(policy, draw, version=BASE) for _ in range(48)]
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
    world = make_world(open_store(spec["storage"]["uri"]), given=spec)
    return world, await run_controller(world, steps_left=steps_left)


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
    assert share_of_good(learners.policy) > share_of_good(load_policy(MODEL, seed=0)) + 0.02

    cut = spec_of(folder, tmp_path / "cut")
    with pytest.raises(ExceptionGroup) as caught:
        await run_phase(make_world, cut, steps_left=1)
    assert isinstance(root_cause(caught.value), ConnectionError)
    again, _ = await run_phase(make_world, cut, steps_left=9)
    assert again.rows("step")[-1]["weight_digest"] == later[-1]["weight_digest"]

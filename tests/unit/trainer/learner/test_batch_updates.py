"""Several updates from one batch, and what is taken over whole rollouts."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.common.api.run.phases import Algorithm
from etude.common.api.storage import Storage
from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.algorithms.registry import build_algorithm
from etude.trainer.learner.batches import KlLimitError, PolicyBatch, PolicySequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.gradients import accumulate_gradients, microbatch_losses
from etude.trainer.learner.learner import Learner
from etude.trainer.learner.objective import PolicyObjective
from etude.trainer.learner.proximal import RowScorer
from etude.trainer.learner.rows import TrainingRow, assign_updates, policy_rows
from etude.trainer.learner.sequence_packing import Packing
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.policy import Policy, load_policy

MODEL = Path(__file__).parents[3] / "data" / "tiny-model"
ALONE = RankGroup(rank=0, size=1, device=torch.device("cpu"))
Build = Callable[..., Learner]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Two threads that spin for each other on a busy machine take twenty times as long."""
    torch.set_num_threads(1)


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def make(name: str = "DrGRPO", **parameters: Any) -> Learner:
        learner = Learner(
            LearnerConfig(
                run="uid",
                holder="test",
                model_folder=MODEL,
                storage=Storage(uri=f"file://{tmp_path}"),
            )
        )
        learner.start_phase(
            {
                "name": "rl",
                "type": "ReinforcementLearning",
                "maxSteps": 50,
                "optimizer": {"learningRate": "1e-2"},
                "tasks": [{"name": "train", "uri": "file:///tasks", "environment": "repos"}],
                "algorithm": {"name": name, "parameters": parameters},
            },
            0,
        )
        return learner

    return make


def algorithm(name: str, **parameters: Any) -> AlgorithmSteps:
    given_algorithm = Algorithm.model_validate({"name": name, "parameters": parameters})
    return build_algorithm(given_algorithm, max_tokens=16)


def links(*, groups: int = 2, logprob: float = -4.2) -> PolicyBatch:
    """Groups of two rollouts, of two links each."""
    rng = np.random.default_rng(1)
    sequences = []
    for rollout in range(2 * groups):
        for _ in range(2):
            size = int(rng.integers(4, 12))
            mask = rng.random(size) < 0.6
            mask[0], mask[1] = False, True
            sequences.append(
                PolicySequence(
                    token_ids=rng.integers(0, 64, size).astype(np.int32),
                    loss_mask=mask,
                    sampler_logprobs=(logprob + 0.1 * rng.standard_normal(size)).astype(np.float32),
                    rollout=rollout,
                )
            )
    return PolicyBatch(
        sequences=tuple(sequences),
        rewards=np.tile([1.0, 0.0], groups),
        groups=np.repeat(np.arange(groups), 2),
        valid=np.ones(2 * groups, dtype=np.bool_),
    )


def scorer(policy: Policy, chosen: AlgorithmSteps, *, max_tokens: int = 1_000) -> RowScorer:
    losses = partial(microbatch_losses, policy, ranks=ALONE, packing=Packing(max_tokens=max_tokens))
    return RowScorer(policy=policy, algorithm=chosen, losses=losses, ranks=ALONE)


def gradient(rows: list[TrainingRow], chosen: AlgorithmSteps, *, max_tokens: int) -> torch.Tensor:
    policy = load_policy(MODEL, seed=5)
    scored = scorer(policy, chosen, max_tokens=max_tokens).add_proximal(rows)
    objective = PolicyObjective(algorithm=chosen, reference=None)
    packing = Packing(max_tokens=max_tokens)
    accumulate_gradients(policy, scored, objective, ranks=ALONE, packing=packing)
    parts = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
    return torch.cat(parts)


def autograd_of_a_rollouts_ratio(batch: PolicyBatch, *, low: float, high: float) -> torch.Tensor:
    """GSPO as written in its paper: one number per rollout, all links in one graph."""
    policy = load_policy(MODEL, seed=5)
    ratios: dict[int, list[torch.Tensor]] = {}
    for sequence in batch.sequences:
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))[None]
        logprobs = policy.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.from_numpy(sequence.loss_mask[1:])
        sampler = torch.from_numpy(sequence.sampler_logprobs[1:])
        ratios.setdefault(sequence.rollout, []).append((own - sampler)[mask])
    loss = torch.zeros(())
    for rollout, parts in ratios.items():
        advantage = float(batch.rewards[rollout]) - 0.5
        ratio = torch.cat(parts).mean().exp()
        bounded = ratio.clamp(1 - low, 1 + high)
        loss = loss - torch.minimum(ratio * advantage, bounded * advantage) / len(ratios)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


@pytest.mark.parametrize("max_tokens", [1_000, 20, 7])
def test_the_ratio_of_a_rollout_covers_links_that_lie_in_several_microbatches(
    max_tokens: int,
) -> None:
    batch = links()
    bounds = {"clipLow": 0.05, "clipHigh": 0.05}
    chosen = algorithm("GSPO", updatesPerBatch=1, **bounds)
    expected = autograd_of_a_rollouts_ratio(batch, low=0.05, high=0.05)
    found = gradient(policy_rows(batch, chosen).rows, chosen, max_tokens=max_tokens)
    assert float(expected.norm()) > 0
    assert torch.allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("GSPO", {"updatesPerBatch": 1, "clipLow": 0.05, "clipHigh": 0.05}),
        ("DrGRPO", {"correction": {"kind": "SequenceMaskTIS", "low": 0.97, "high": 1.03}}),
        ("DAPO", {"opsmDelta": 0.01}),
        ("PPO", {"logRatioPenalty": 0.1}),
    ],
)
@settings(max_examples=4)  # each example is several passes
@given(max_tokens=st.integers(5, 60), order=st.permutations(range(8)))
def test_no_cut_of_a_batch_changes_what_is_taken_over_whole_rollouts(
    name: str, parameters: dict[str, Any], max_tokens: int, order: list[int]
) -> None:
    chosen = algorithm(name, **parameters)
    batch = links()
    expected = gradient(policy_rows(batch, chosen).rows, chosen, max_tokens=1_000)
    moved = replace(batch, sequences=tuple(batch.sequences[place] for place in order))
    found = gradient(policy_rows(moved, chosen).rows, chosen, max_tokens=max_tokens)
    assert torch.allclose(found, expected, atol=2e-6)


@given(groups=st.lists(st.integers(0, 9), min_size=1, max_size=40), updates=st.integers(1, 8))
def test_updates_share_whole_groups_evenly(groups: list[int], updates: int) -> None:
    numbers = np.array(groups)
    assigned = assign_updates(numbers, updates=updates)
    by_group = {group: set(assigned[numbers == group]) for group in set(groups)}
    assert all(len(found) == 1 for found in by_group.values())
    counts = np.bincount([found.pop() for found in by_group.values()], minlength=updates)
    assert len(counts) == updates
    assert counts.max() - counts.min() <= 1


def test_each_update_has_the_denominators_of_its_own_groups() -> None:
    chosen = algorithm("PPO", updatesPerBatch=2)
    batch = links(groups=4)
    rows = policy_rows(batch, chosen).rows
    for update in range(2):
        own = [row for row in rows if row.update == update]
        assert {row.rollout for row in own} == set(range(4 * update, 4 * update + 4))
        assert sum(float(row.weights.sum()) for row in own) == pytest.approx(1)


def test_a_batch_is_one_step_whatever_its_updates(build: Build) -> None:
    learner = build(updatesPerBatch=2)
    result = learner.policy_step(links())
    assert learner.steps_done == 1
    assert result.trained_tokens == sum(int(s.loss_mask.sum()) for s in links().sequences)
    assert result.weight_digest == learner.digest()


def test_the_same_batch_gives_the_same_bits_with_several_updates(build: Build) -> None:
    digests = {build("GSPO").policy_step(links(groups=4)).weight_digest for _ in range(2)}
    assert len(digests) == 1


def test_later_updates_are_compared_with_the_weights_before_the_batch(build: Build) -> None:
    """Else the weights' own change would look like an engine that serves other weights."""
    results = [build(updatesPerBatch=updates).policy_step(links()) for updates in (1, 2)]
    assert results[1].mismatch_mean == pytest.approx(results[0].mismatch_mean, abs=1e-5)


def test_more_updates_than_groups_make_one_of_each_group(build: Build) -> None:
    digests = [build(updatesPerBatch=n).policy_step(links()).weight_digest for n in (2, 16)]
    assert digests[0] == digests[1]


def test_a_batch_without_signal_makes_no_update(build: Build) -> None:
    learner = build(updatesPerBatch=2)
    before = learner.digest()
    batch = links()
    batch.rewards[:] = 1.0
    result = learner.policy_step(batch)
    assert (result.loss, result.trained_tokens, learner.steps_done) == (0, 0, 1)
    assert result.weight_digest == before


@pytest.mark.parametrize(
    ("name", "sampled_at", "parameters"),
    [
        # Freshly drawn weights give about -4.2: the ratio is 6 where -6 was sampled, 0.1 at -2.
        ("DrGRPO", -6, {"clipHigh": 9}),
        ("DrGRPO", -2, {"clipLow": 0.95}),
        ("DrGRPO", -6, {"correction": {"kind": "TIS", "high": 2}}),
        ("DrGRPO", -6, {"correction": {"kind": "IcePop", "low": 0.5, "high": 9}}),
        ("DrGRPO", -6, {"klCoefficient": 0.1}),
        ("GRPO", -6, {"clipHigh": 9}),
        ("GRPO", -2, {"clipLow": 0.95}),
        ("RLOO", -6, {"correction": {"kind": "TIS", "high": 2}}),
        ("RLOO", -6, {"correction": {"kind": "IcePop", "low": 0.5, "high": 5}}),
        ("RLOO", -6, {"klCoefficient": 0.1}),
        ("DrGRPO", -6, {"updatesPerBatch": 2}),
        # A rollout's mean of rho is outside: all of it is masked.
        ("DrGRPO", -6, {"correction": {"kind": "SequenceMaskTIS", "low": 0.5, "high": 2}}),
        ("RLOO", -2, {"opsmDelta": 0.1}),
        ("DrGRPO", -6, {"logRatioPenalty": 0.1}),
        ("PPO", -6, {"clipHigh": 9}),
        ("PPO", -2, {"clipLow": 0.95}),
        ("DAPO", -6, {"clipHigh": 9}),
        ("DAPO", -2, {"clipLow": 0.95}),
        ("GSPO", -6, {"clipHigh": 9}),
        ("GSPO", -2, {"clipLow": 0.95}),
        ("GSPO", -6, {"updatesPerBatch": 1}),
        ("CISPO", -6, {"clipHigh": 9}),
        ("SAPO", -4.5, {"temperaturePositive": 5}),
        ("SAPO", -4.5, {"temperatureNegative": 5}),
        ("DPPO", -0.3, {"divergence": 0.9}),
        # The second update starts from other weights than the batch.
        ("DecoupledPPO", -4, {"clipLow": 1e-4}),
        ("DecoupledPPO", -4, {"clipHigh": 1e-4}),
        ("DecoupledPPO", -4, {"updatesPerBatch": 1}),
    ],
)
def test_every_parameter_changes_the_update(
    build: Build, name: str, sampled_at: float, parameters: dict[str, object]
) -> None:
    digests = set()
    for settled in ({}, parameters):
        learner = build(name, **settled)
        learner.policy_step(links(logprob=sampled_at))
        digests.add(learner.policy_step(links(logprob=sampled_at)).weight_digest)
    assert len(digests) == 2


def test_the_divergence_of_a_rollout_is_subtracted_from_its_reward_before_the_mean() -> None:
    chosen = algorithm("DrGRPO", klCoefficient=0.5, klCredit="Sequence")
    batch = links()
    rows = policy_rows(batch, chosen).rows
    policy = load_policy(MODEL, seed=5)
    found, mean = scorer(policy, chosen, max_tokens=20).penalise(
        rows, batch, lambda microbatch: torch.full_like(microbatch.weights, -5.0)
    )
    logprobs = scorer(policy, chosen).score_rows(rows)
    sums = np.zeros(4)
    for row, values in zip(rows, logprobs, strict=True):
        sums[row.rollout] += float((values + 5.0).sum())
    rewards = batch.rewards - 0.5 * sums
    expected = rewards - rewards.reshape(2, 2).mean(1).repeat(2)
    for row in found:
        assert row.advantages == pytest.approx(expected[row.rollout], abs=1e-4)
    assert mean == pytest.approx(sums.sum() / sum(v.size for v in logprobs), abs=1e-5)


def test_credit_by_rollout_and_by_token_are_different_updates_from_the_same_divergence(
    build: Build,
) -> None:
    results = []
    for credit in ("Token", "Sequence"):
        learner = build(klCoefficient=0.1, klCredit=credit)
        learner.policy_step(links())
        results.append(learner.policy_step(links()))
    first, second = (result.extra["reference_kl"] for result in results)
    assert first != 0
    assert second != 0
    assert results[0].weight_digest != results[1].weight_digest


def test_a_rollout_without_advantage_is_pulled_to_the_reference_with_its_siblings() -> None:
    batch = links()
    same = replace(batch, groups=np.zeros(4, dtype=np.int64), rewards=np.array([0.0, 0.5, 1, 0.5]))
    for parameters, rollouts in (({}, {0, 2}), ({"klCoefficient": 0.1}, {0, 1, 2, 3})):
        rows = policy_rows(same, algorithm("DrGRPO", **parameters)).rows
        assert {row.rollout for row in rows} == rollouts


def test_an_update_too_far_from_its_sampler_is_left_out_and_counted(build: Build) -> None:
    learner = build(klLimit=0.1)
    before = learner.digest()
    far = learner.policy_step(links(logprob=-6.0))
    assert (far.extra["limited_fraction"], far.grad_norm, learner.steps_done) == (1, 0, 1)
    assert far.weight_digest == before
    near = learner.policy_step(links())
    assert near.extra["limited_fraction"] == 0
    assert near.weight_digest != before


def test_a_phase_that_stops_at_the_limit_says_how_far_the_policy_is(build: Build) -> None:
    learner = build(klLimit=0.1, onKlLimit="Stop")
    before = learner.digest()
    with pytest.raises(KlLimitError, match=r"nats a token, more than klLimit 0.1; the update was"):
        learner.policy_step(links(logprob=-6.0))
    assert learner.digest() == before
    with pytest.raises(ValueError, match="onKlLimit is ignored without klLimit"):
        algorithm("DrGRPO", onKlLimit="Stop")


def test_a_limit_leaves_out_single_updates_of_a_batch(build: Build) -> None:
    learner = build(klLimit=0.07, updatesPerBatch=4)
    result = learner.policy_step(links(groups=8))
    assert 0 < result.extra["limited_fraction"] < 1


def test_masked_rollouts_and_the_effective_sample_size_are_reported(build: Build) -> None:
    correction = {"kind": "SequenceMaskTIS", "low": 0.999, "high": 1.001}
    result = build(correction=correction).policy_step(links())
    assert 0 < result.extra["masked_fraction"] <= 1
    assert 0.9 < result.extra["effective_sample_size"] < 1

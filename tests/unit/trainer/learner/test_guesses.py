"""Training of the head of multi-token prediction: its loss, and what it leaves alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.trainer.mtp_folder import write_mtp_config
from tests.support.trainer.rank_processes import run_ranks
from torch import Tensor

from etude.common.api.run.phases import Phase
from etude.common.api.storage import Storage
from etude.common.errors import InvalidFieldError
from etude.trainer.learner.batches import PolicyBatch, PolicySequence, SupervisedSequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.gradients import accumulate_gradients
from etude.trainer.learner.guesses import add_guesses
from etude.trainer.learner.learner import Learner
from etude.trainer.learner.objective import imitation_loss
from etude.trainer.learner.phase import PhaseManager
from etude.trainer.learner.rows import TrainingRow
from etude.trainer.learner.sequence_packing import Packing, collate
from etude.trainer.model import fsdp
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.mtp.distillation import score_guesses
from etude.trainer.model.mtp.heads import find_heads, is_head_parameter
from etude.trainer.model.parameters import gather_full
from etude.trainer.model.policy import InvalidModelError, Policy, load_policy

ALONE = RankGroup(rank=0, size=1, device=torch.device("cpu"))
MODEL = Path(__file__).parents[3] / "data" / "tiny-model"
PHASE: dict[str, Any] = {
    "name": "sft",
    "type": "SupervisedFineTuning",
    "maxSteps": 40,
    "optimizer": {"learningRate": "1e-2", "gradientClip": "0.05"},
    "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
}
MTP = PHASE | {"mtp": {"lossWeight": "0.5"}}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Two threads that spin for each other on a busy machine take twenty times as long."""
    torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_mtp_config(tmp_path / "model")


def rows(*lengths: int) -> list[TrainingRow]:
    rng = np.random.default_rng(0)
    return [
        TrainingRow(
            token_ids=rng.integers(0, 64, length).astype(np.int32),
            places=np.arange(1, length),
            weights=np.full(length - 1, 0.01, np.float32),
        )
        for length in lengths
    ]


BATCH = rows(17, 9, 1, 40, 2, 3, 25)
GUESSES = 15 + 7 + 38 + 1 + 23


def backward(
    policy: Policy,
    phase: dict[str, Any],
    batch: list[TrainingRow] = BATCH,
    *,
    packed: bool = False,
    ranks: RankGroup = ALONE,
) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    guesses = add_guesses(imitation_loss, Phase.model_validate(phase), batch)
    loss = accumulate_gradients(
        policy,
        batch,
        guesses or imitation_loss,
        ranks=ranks,
        packing=Packing(max_tokens=60, packed=packed),
        guesses=guesses is not None,
    )
    found = {n: gather_full(p.grad) for n, p in policy.named_parameters() if p.grad is not None}
    return loss, guesses.summary(ranks) if guesses else {}, found


@settings(max_examples=30)
@given(seed=st.integers(0, 1_000), count=st.integers(0, 9), rows=st.integers(1, 10))
def test_the_loss_is_the_divergence_from_the_teacher_and_its_entropy(
    seed: int, count: int, rows: int
) -> None:
    make = torch.Generator().manual_seed(seed)
    guesses, teachers = (torch.randn(count, 12, generator=make) for _ in range(2))
    weight = torch.randn(31, 12, generator=make)
    naive, ours = guesses.clone().requires_grad_(), guesses.clone().requires_grad_()
    wanted = (teachers @ weight.t()).softmax(-1)
    guessed = (naive @ weight.t()).log_softmax(-1)
    expected = -(wanted * guessed).sum()
    found = score_guesses(ours, teachers, weight=weight, chunk_logits=31 * rows)
    divergence = torch.nn.functional.kl_div(guessed, wanted, reduction="sum")
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(found.loss, divergence + found.entropy, atol=1e-4, rtol=1e-5)
    assert int(found.agreeing) == int((wanted.argmax(-1) == guessed.argmax(-1)).sum())
    (3 * expected).backward()
    (3 * found.loss).backward()
    torch.testing.assert_close(ours.grad, naive.grad, atol=1e-5, rtol=1e-4)


def test_the_teacher_predicts_the_token_that_the_head_guesses(folder: Path) -> None:
    policy = load_policy(folder, seed=1)
    model, [head] = policy.model, find_heads(policy.model)
    ids = torch.from_numpy(BATCH[0].token_ids.astype(np.int64))[None]
    positions = torch.arange(17)[None]
    with torch.no_grad():
        output = model.model(ids, output_hidden_states=True)
        trunk = []
        hook = model.model.norm.register_forward_pre_hook(lambda _, given: trunk.append(given[0]))
        predicted = model(ids).logits.softmax(-1)
        hook.remove()
        states = head(
            trunk[0][:, :-1],
            model.model.embed_tokens(ids[:, 1:]),
            positions[:, :-1],
            attention_mask=None,
            position_embeddings=model.model.rotary_emb(output[0], positions[:, :-1]),
        )
        guessed = model.lm_head(states).log_softmax(-1)
    # At position t the head has seen tokens up to t + 1, as the model has at t + 1.
    losses = [
        float(-(predicted[0, shift : 15 + shift] * guessed[0, :15]).sum(-1).mean())
        for shift in (0, 1, 2)
    ]
    _, figures, _ = backward(policy, MTP, BATCH[:1])
    assert figures["mtp_loss"] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
    assert losses[2] != pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("packed", [False, True])
def test_the_head_changes_neither_loss_nor_gradient_of_the_policy(
    folder: Path, *, packed: bool
) -> None:
    policy = load_policy(folder, seed=1)
    plain_loss, _, plain = backward(policy, PHASE, packed=packed)
    loss, _, found = backward(policy, MTP, packed=packed)
    assert loss == plain_loss
    of_head = {name for name in found if is_head_parameter(name)}
    assert of_head == {n for n, _ in policy.named_parameters() if is_head_parameter(n)}
    assert found.keys() - of_head == plain.keys()
    assert all(torch.equal(plain[name], found[name]) for name in plain)


def test_packed_and_padded_guesses_have_the_same_gradient(folder: Path) -> None:
    _, padded_figures, padded = backward(load_policy(folder, seed=1), MTP)
    _, packed_figures, packed = backward(load_policy(folder, seed=1), MTP, packed=True)
    assert packed_figures == pytest.approx(padded_figures, rel=1e-5)
    assert sum(len(collate([row], device=ALONE.device).guessing) for row in BATCH) == GUESSES
    for name, expected in padded.items():
        torch.testing.assert_close(packed[name], expected, atol=1e-6, rtol=1e-4)


def test_documents_do_not_see_the_tokens_of_others(folder: Path) -> None:
    policy = load_policy(folder, seed=1)
    alone = [backward(policy, MTP, [row], packed=True)[1].get("mtp_loss", 0.0) for row in BATCH]
    guesses = [max(0, row.token_ids.size - 2) for row in BATCH]
    together = backward(policy, MTP, packed=True)[1]["mtp_loss"]
    assert together == pytest.approx(np.dot(alone, guesses) / sum(guesses), rel=1e-5)


def run_rank(rank: int, folder: Path) -> dict[str, Any]:
    ranks = fsdp.join_ranks(rank=rank, size=2, rendezvous=f"file://{folder}/meet")
    loss, figures, found = backward(load_policy(folder, seed=1, ranks=ranks), MTP, ranks=ranks)
    fsdp.leave_ranks(ranks)
    return {
        "loss": loss,
        "figures": figures,
        "gradients": {n: g.tolist() for n, g in found.items()},
    }


def test_two_ranks_have_the_gradient_of_one(folder: Path) -> None:
    loss, figures, expected = backward(load_policy(folder, seed=1), MTP)
    found = run_ranks(run_rank, folder, size=2)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["figures"] == pytest.approx(figures, rel=1e-5)
    for name, gradient in expected.items():
        other = torch.tensor(found["gradients"][name])
        torch.testing.assert_close(other, gradient, atol=1e-6, rtol=1e-4)


def texts() -> list[SupervisedSequence]:
    return [
        SupervisedSequence(token_ids=row.token_ids, weights=np.ones(row.token_ids.size, np.float32))
        for row in BATCH
        if row.token_ids.size > 1
    ]


def build(folder: Path, store: Path) -> Learner:
    return Learner(
        LearnerConfig(
            run="uid",
            holder="test",
            model_folder=folder,
            storage=Storage(uri=f"file://{store}"),
            seed=1,
        )
    )


def weights(learner: Learner, *, of_heads: bool) -> dict[str, Tensor]:
    return {
        name: parameter.detach().clone()
        for name, parameter in learner.policy.named_parameters()
        if is_head_parameter(name) == of_heads
    }


def test_steps_train_the_head_and_move_the_policy_as_without_it(
    folder: Path, tmp_path: Path
) -> None:
    plain, learner = build(folder, tmp_path), build(folder, tmp_path)
    plain.start_phase(PHASE, 0)
    learner.start_phase(MTP, 0)
    start = weights(learner, of_heads=True)
    for _ in range(5):
        expected = plain.supervised_step(texts())
        result = learner.supervised_step(texts())
        assert (result.loss, result.grad_norm) == (expected.loss, expected.grad_norm)
    found = weights(learner, of_heads=False)
    assert all(torch.equal(found[n], w) for n, w in weights(plain, of_heads=False).items())
    assert all(torch.equal(start[n], w) for n, w in weights(plain, of_heads=True).items())
    assert not any(torch.equal(start[n], w) for n, w in weights(learner, of_heads=True).items())


def rollouts() -> PolicyBatch:
    """Two groups of two."""
    sequences = tuple(
        PolicySequence(
            token_ids=row.token_ids,
            loss_mask=np.arange(row.token_ids.size) % 3 > 0,
            sampler_logprobs=np.full(row.token_ids.size, -4.0, np.float32),
            rollout=number,
        )
        for number, row in enumerate(rows(12, 20, 9, 15))
    )
    rewards, groups = np.array([1.0, 0, 0, 1]), np.repeat([0, 1], 2)
    return PolicyBatch(
        sequences=sequences, rewards=rewards, groups=groups, valid=np.ones(4, dtype=np.bool_)
    )


@pytest.mark.parametrize("updates", [1, 2])
def test_policy_steps_train_the_head_and_move_the_policy_as_without_it(
    folder: Path, tmp_path: Path, updates: int
) -> None:
    phase = {
        "name": "rl",
        "type": "ReinforcementLearning",
        "maxSteps": 9,
        "optimizer": {"learningRate": "1e-2"},
        "tasks": [{"name": "train", "uri": "file:///tasks", "environment": "repos"}],
        "algorithm": {
            "name": "PPO",
            "groupSize": 2,
            "promptsPerStep": 2,
            "parameters": {"updatesPerBatch": updates},
        },
    }
    plain, learner = build(folder, tmp_path), build(folder, tmp_path)
    plain.start_phase(phase, 0)
    learner.start_phase(phase | {"mtp": {}}, 0)
    start = weights(learner, of_heads=True)
    expected, result = plain.policy_step(rollouts()), learner.policy_step(rollouts())
    assert (result.loss, result.grad_norm) == (expected.loss, expected.grad_norm)
    assert result.extra["mtp_loss"] > result.extra["mtp_kl"] > 0
    assert not expected.extra.keys() & {"mtp_loss", "mtp_kl", "mtp_agreement"}
    found = weights(learner, of_heads=False)
    assert all(torch.equal(found[n], w) for n, w in weights(plain, of_heads=False).items())
    assert not any(torch.equal(start[n], w) for n, w in weights(learner, of_heads=True).items())


def test_the_head_learns_what_the_policy_predicts(folder: Path, tmp_path: Path) -> None:
    learner = build(folder, tmp_path)
    learner.start_phase(MTP | {"optimizer": {"learningRate": "1e-2"}}, 0)
    results = [learner.supervised_step(texts()).extra for _ in range(40)]
    assert results[-1]["mtp_kl"] < 0.5 * results[0]["mtp_kl"]
    assert results[-1]["mtp_agreement"] > results[0]["mtp_agreement"] + 0.2


def test_a_checkpoint_resumes_the_head_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    learner, restored = build(folder, tmp_path), build(folder, tmp_path)
    learner.start_phase(MTP, 0)
    learner.supervised_step(texts())
    learner.copy_state("checkpoints/1")
    learner.save("checkpoints/1")
    restored.restore("checkpoints/1")
    expected, found = (each.supervised_step(texts()) for each in (learner, restored))
    assert found.weight_digest == expected.weight_digest
    assert found.extra == expected.extra


def test_an_export_has_the_head_and_loads_again(folder: Path, tmp_path: Path) -> None:
    learner = build(folder, tmp_path)
    learner.start_phase(MTP, 0)
    learner.export("export")
    again = load_policy(tmp_path / "export", seed=9)
    found = {n: p for n, p in again.named_parameters() if is_head_parameter(n)}
    expected = weights(learner, of_heads=True)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].detach(), value.bfloat16().float())


def test_a_phase_without_a_head_to_train_is_refused() -> None:
    manager = PhaseManager(load_policy(MODEL, seed=1), ALONE)
    with pytest.raises(InvalidFieldError, match="no head of multi-token prediction"):
        manager.begin(Phase.model_validate(MTP), 0, under_way=None)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_nextn_predict_layers": 2}, "engines run 1"),
        ({"num_nextn_predict_layers": None}, "engines run 1"),
        ({"use_sliding_window": True}, "use_sliding_window: false"),
    ],
)
def test_heads_that_no_engine_runs_are_refused(
    tmp_path: Path, fields: dict[str, object], words: str
) -> None:
    with pytest.raises(InvalidModelError, match=words):
        load_policy(write_mtp_config(tmp_path, **fields), seed=1)

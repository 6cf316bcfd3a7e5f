"""What each token of a batch counts, whatever way the batch is cut."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.api.run.algorithms import PARAMETERS
from etude.common.api.run.phases import Algorithm
from etude.common.errors import InvalidFieldError
from etude.common.weights import VersionId
from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.algorithms.registry import build_algorithm
from etude.trainer.contents.rollout_checks import check_rollout
from etude.trainer.controller.admission.groups import (
    RolloutGroup,
    build_policy_batch,
)
from etude.trainer.learner.batches import (
    PolicyBatch,
    PolicySequence,
    SupervisedSequence,
    check_sequences,
    links_of,
)
from etude.trainer.learner.rows import TrainingRow, policy_rows, sample_rows, supervised_rows
from etude.v1 import journal_pb2, rewards_pb2, rollout_pb2, weights_pb2


def algorithm(name: str = "DrGRPO", **parameters: Any) -> AlgorithmSteps:
    return build_algorithm(
        Algorithm.model_validate({"name": name, "parameters": parameters}), max_tokens=480
    )


def sequence(rollout: int, mask: str, *, logprob: float = -1.0) -> PolicySequence:
    trained = np.array([letter == "x" for letter in mask])
    return PolicySequence(
        token_ids=np.arange(len(mask), dtype=np.int32),
        loss_mask=trained,
        sampler_logprobs=np.where(trained, logprob, 0.0).astype(np.float32),
        rollout=rollout,
    )


def batch(
    *sequences: PolicySequence,
    rewards: list[float],
    groups: list[int],
    masked: tuple[int, ...] = (),
) -> PolicyBatch:
    valid = np.ones(len(rewards), dtype=np.bool_)
    valid[list(masked)] = False
    return PolicyBatch(
        sequences=sequences, rewards=np.array(rewards), groups=np.array(groups), valid=valid
    )


def test_the_demos_formula_divides_by_prompts_times_group_size_times_64() -> None:
    two_groups = batch(
        *(sequence(rollout, "..xx.x") for rollout in range(8)),
        rewards=[1, 0, 0, 1, 0, 0, 0, 0],
        groups=[0] * 4 + [1] * 4,
    )
    found = policy_rows(two_groups, algorithm(lossScale=64))
    # The second group has no spread: it is left out of the pass, but not of the denominator.
    assert (len(found.rows), found.filtered) == (4, 4)
    for row in found.rows:
        assert row.weights == pytest.approx(1 / (8 * 64))
        assert row.places.tolist() == [2, 3, 5]
    assert [float(row.advantages[0]) for row in found.rows] == [0.5, -0.5, -0.5, 0.5]


def test_the_default_denominator_is_the_token_limit_of_a_rollout() -> None:
    pair = batch(sequence(0, ".x"), sequence(1, ".x"), rewards=[1, 0], groups=[0, 0])
    assert policy_rows(pair, algorithm()).rows[0].weights == pytest.approx(1 / (2 * 480))


def test_the_filter_changes_no_weight() -> None:
    mixed = batch(
        *(sequence(rollout, ".xx") for rollout in range(4)),
        rewards=[1, 0, 1, 1],
        groups=[0, 0, 1, 1],
    )
    filtered = policy_rows(mixed, algorithm("GRPO"))
    full = policy_rows(mixed, algorithm("GRPO", groupFilter="None"))
    assert (len(filtered.rows), len(full.rows)) == (2, 4)
    for ours, same in zip(filtered.rows, full.rows[:2], strict=True):
        assert ours.weights.tolist() == same.weights.tolist()
    assert not any(row.advantages.any() for row in full.rows[2:])


def test_a_masked_rollout_is_in_no_row_and_no_denominator() -> None:
    group = batch(
        *(sequence(rollout, ".x") for rollout in range(3)),
        rewards=[1, 0, 0],
        groups=[0, 0, 0],
        masked=(2,),
    )
    found = policy_rows(group, algorithm(lossScale=1))
    assert len(found.rows) == 2
    assert found.rows[0].weights == pytest.approx(1 / 2)


@pytest.mark.parametrize("logprob", [-np.inf, np.nan, np.inf])
def test_a_token_that_the_sampler_gave_no_probability_is_removed_and_counted(
    logprob: float,
) -> None:
    broken = sequence(0, "..xxx")
    broken.sampler_logprobs[3] = logprob
    found = policy_rows(
        batch(broken, sequence(1, "..xxx"), rewards=[1, 0], groups=[0, 0]), algorithm()
    )
    assert found.removed == 1
    assert found.rows[0].places.tolist() == [2, 4]
    assert np.isfinite(found.rows[0].sampler_logprobs).all()


@given(data=st.data(), size=st.integers(2, 20))
def test_of_any_checked_rollout_exactly_the_tokens_without_a_log_prob_are_removed(
    data: st.DataObject, size: int
) -> None:
    version = weights_pb2.PolicyVersion(epoch=1, number=1)
    values = st.lists(
        st.sampled_from([-1.0, -0.5, math.nan, math.inf, -math.inf]), min_size=size, max_size=size
    )
    logprobs = data.draw(values)
    records = []
    for index, given_logprobs in enumerate((logprobs, [-1.0] * size)):
        link = rollout_pb2.Link(
            token_ids=[1] * (size + 1),
            loss_mask=bytes([0] + [1] * size),
            sampler_logprobs=[math.nan, *given_logprobs],
            spans=[weights_pb2.PolicySpan(sampled=version, context=version, start=1, end=size + 1)],
        )
        made = rollout_pb2.Rollout(
            rollout_id=f"g-{index}", index=index, links=[link], oldest=version, newest=version
        )
        check_rollout(made, vocab_size=4, max_tokens=64, position_of={VersionId(1, 1): 1}.get)
        reward = rewards_pb2.RewardRecord(reward=float(index))
        records.append(journal_pb2.JournalRollout(rollout=made, reward=reward))
    group = RolloutGroup(
        group_id="g",
        phase="rl",
        position=0,
        task_id="t",
        seed=0,
        sequence=1,
        finished=dict(enumerate(records)),
    )
    found = policy_rows(build_policy_batch([group]), algorithm())
    finite = [place + 1 for place, value in enumerate(logprobs) if math.isfinite(value)]
    assert found.removed == size - len(finite)
    assert [row.places.tolist() for row in found.rows] == [
        places for places in (finite, list(range(1, size + 1))) if places
    ]


@given(
    sizes=st.lists(st.integers(1, 50), max_size=12),
    tokens=st.integers(1, 200),
    seed=st.integers(0, 2**40),
)
def test_a_sample_of_rows_has_enough_tokens_and_no_row_twice(
    sizes: list[int], tokens: int, seed: int
) -> None:
    rows = [
        TrainingRow(
            token_ids=np.zeros(size, np.int32),
            places=np.zeros(0, np.int64),
            weights=np.zeros(0, np.float32),
        )
        for size in sizes
    ]
    drawn = sample_rows(rows, tokens=tokens, seed=seed)
    again = sample_rows(rows, tokens=tokens, seed=seed)
    assert [id(row) for row in drawn] == [id(row) for row in again]
    assert len({id(row) for row in drawn}) == len(drawn)
    total = sum(row.token_ids.size for row in drawn)
    assert total >= min(tokens, sum(sizes))
    # No more than the row that reached the budget went beyond it.
    assert not drawn or total - drawn[-1].token_ids.size < tokens


def test_a_phase_with_staleness_corrects_its_tokens_unless_told_otherwise() -> None:
    def correction(name: str, *, staleness: int, **parameters: Any) -> Any:
        given_algorithm = Algorithm.model_validate({"name": name, "parameters": parameters})
        built = build_algorithm(given_algorithm, max_tokens=480, max_staleness=staleness)
        return built.parameters.token_correction

    for name in ("DrGRPO", "GRPO", "RLOO", "PPO", "DAPO", "GSPO", "CISPO", "SAPO"):
        assert correction(name, staleness=0).kind == "None"
        assert (correction(name, staleness=1).kind, correction(name, staleness=1).high) == (
            "TIS",
            2.0,
        )
        assert correction(name, staleness=4, correction={"kind": "None"}).kind == "None"
    assert correction("DrGRPO", staleness=4, clipHigh=0.3).kind == "None"
    assert correction("DrGRPO", staleness=0, clipHigh=0.3).kind == "None"
    assert correction("SAPO", staleness=4, temperatureNegative=1.1).kind == "None"
    # With several updates the clip is about the trainer's own ratio, beside the correction.
    assert correction("DrGRPO", staleness=4, clipHigh=0.3, updatesPerBatch=2).kind == "TIS"
    for name in ("DPPO", "DecoupledPPO"):
        assert correction(name, staleness=4).kind == "None"


def test_a_log_prob_off_the_mask_is_never_read() -> None:
    odd = sequence(0, ".x.x")
    odd.sampler_logprobs[[0, 2]] = np.nan
    found = policy_rows(batch(odd, sequence(1, ".x"), rewards=[1, 0], groups=[0, 0]), algorithm())
    assert found.removed == 0


@given(
    mask=st.text("x.", min_size=1, max_size=30),
    cuts=st.sets(st.integers(1, 29)),
    name=st.sampled_from(list(PARAMETERS)),
)
def test_cutting_a_rollout_into_links_changes_no_token(
    mask: str, cuts: set[int], name: str
) -> None:
    mask = "." + mask
    # A link starts with context, so a cut is only possible before a token that is not trained.
    places = sorted(cut for cut in cuts if cut < len(mask) and mask[cut] == ".")
    edges = [0, *places, len(mask)]
    links = [mask[a:b] for a, b in pairwise(edges)]
    sibling = sequence(1, ".xx")

    def tokens(*parts: str) -> list[tuple[float, float]]:
        whole = batch(
            *(sequence(0, part) for part in parts), sibling, rewards=[1, 0], groups=[0, 0]
        )
        rows = policy_rows(whole, algorithm(name)).rows
        return [
            (float(weight), float(advantage))
            for row in rows
            for weight, advantage in zip(row.weights, row.advantages, strict=True)
        ]

    assert tokens(*links) == tokens(mask)


def test_supervised_weights_sum_to_one_and_the_first_token_is_never_predicted() -> None:
    sequences = [
        SupervisedSequence(
            token_ids=np.arange(n, dtype=np.int32), weights=np.full(n, 0.5, np.float32)
        )
        for n in (3, 5)
    ]
    found = supervised_rows(sequences)
    assert [row.places.tolist() for row in found] == [[1, 2], [1, 2, 3, 4]]
    assert sum(row.weights.sum() for row in found) == pytest.approx(1)


def test_a_batch_without_weight_has_no_rows() -> None:
    nothing = SupervisedSequence(
        token_ids=np.arange(4, dtype=np.int32), weights=np.zeros(4, np.float32)
    )
    assert supervised_rows([nothing]) == []


def test_links_come_from_the_wire_as_they_were_sampled() -> None:
    rollout = rollout_pb2.Rollout(
        links=[
            rollout_pb2.Link(
                token_ids=[5, 6, 7], loss_mask=b"\0\1\1", sampler_logprobs=[0.0, -0.5, -0.25]
            )
        ]
    )
    (link,) = links_of(rollout, index=3)
    assert link.rollout == 3
    assert link.token_ids.tolist() == [5, 6, 7]
    assert link.loss_mask.tolist() == [False, True, True]
    assert link.sampler_logprobs.tolist() == [0.0, -0.5, -0.25]


def test_bad_batches_are_refused_by_field() -> None:
    with pytest.raises(InvalidFieldError, match=r"loss_mask: has shape \(2,\)"):
        PolicySequence(
            token_ids=np.zeros(3, np.int32),
            loss_mask=np.zeros(2, np.bool_),
            sampler_logprobs=np.zeros(3, np.float32),
            rollout=0,
        )
    with pytest.raises(InvalidFieldError, match=r"loss_mask\[0\]"):
        sequence(0, "x.")
    with pytest.raises(InvalidFieldError, match=r"sequences\[0\]\.rollout: 2 is outside"):
        batch(sequence(2, ".x"), rewards=[0, 1], groups=[0, 0])
    with pytest.raises(InvalidFieldError, match="rewards: must be finite"):
        batch(sequence(0, ".x"), rewards=[np.nan, 1], groups=[0, 0])
    with pytest.raises(InvalidFieldError, match="must be one row of tokens"):
        SupervisedSequence(token_ids=np.zeros(0, np.int32), weights=np.zeros(0, np.float32))
    with pytest.raises(InvalidFieldError, match="weights: must be finite and not negative"):
        SupervisedSequence(token_ids=np.zeros(1, np.int32), weights=np.full(1, np.nan, np.float32))


def test_what_the_model_cannot_read_is_refused_by_place() -> None:
    good = sequence(0, "..x")
    with pytest.raises(
        InvalidFieldError, match=r"sequences\[1\]\.token_ids\[2\]: 2 is outside the vocabulary of 2"
    ):
        check_sequences([sequence(0, ".x"), good], vocabulary=2, context=8)
    with pytest.raises(InvalidFieldError, match="3 tokens, the model takes 2"):
        check_sequences([good], vocabulary=9, context=2)


@pytest.mark.parametrize("name", ["DrGRPO", "GRPO"])
def test_a_rollout_that_lost_its_siblings_has_no_part_in_anything(name: str) -> None:
    whole = [sequence(0, ".xx"), sequence(1, ".x")]
    alone = batch(*whole, rewards=[1, 0], groups=[0, 0])
    beside = batch(
        *whole, sequence(2, ".xxxx"), rewards=[1, 0, 5, 0], groups=[0, 0, 1, 1], masked=(3,)
    )
    expected, found = (policy_rows(each, algorithm(name)) for each in (alone, beside))
    assert [row.advantages.tolist() for row in found.rows] == [
        row.advantages.tolist() for row in expected.rows
    ]
    assert [row.weights.tolist() for row in found.rows] == [
        row.weights.tolist() for row in expected.rows
    ]
    assert (found.removed, found.filtered) == (0, 0)

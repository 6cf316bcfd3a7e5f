"""Nothing that cannot be trained on is acknowledged as a rollout."""

import math

import pytest

from etude.common.errors import InvalidFieldError, WrongStateError
from etude.common.weights import VersionId
from etude.trainer.contents.rollout_checks import check_rollout
from etude.trainer.controller.admission.groups import (
    RolloutGroup,
    build_policy_batch,
    check_reward,
)
from etude.v1.journal_pb2 import JournalRollout
from etude.v1.rewards_pb2 import RewardFault, RewardRecord
from etude.v1.rollout_pb2 import Link, Rollout
from etude.v1.weights_pb2 import PolicySpan, PolicyVersion

KNOWN = {VersionId(1, 4): 4, VersionId(1, 5): 5}
OLD, NEW = PolicyVersion(epoch=1, number=4), PolicyVersion(epoch=1, number=5)


def span(start: int, end: int) -> PolicySpan:
    return PolicySpan(sampled=NEW, context=OLD, start=start, end=end)


def link(**changed: object) -> Link:
    fields: dict[str, object] = {
        "token_ids": [1, 2, 3, 4],
        "loss_mask": bytes([0, 0, 1, 1]),
        "sampler_logprobs": [0.0, 0.0, -0.5, -0.25],
        "spans": [PolicySpan(sampled=NEW, context=OLD, start=2, end=4)],
    }
    return Link(**{**fields, **changed})  # type: ignore[arg-type]  # hostile on purpose


def rollout(*links: Link, index: int = 0) -> Rollout:
    return Rollout(
        rollout_id=f"g-{index}", group_id="g", index=index, links=links, oldest=OLD, newest=NEW
    )


def check(given: Rollout) -> None:
    check_rollout(given, vocab_size=10, max_tokens=6, position_of=KNOWN.get)


def test_a_sound_rollout_passes() -> None:
    check(rollout(link(), link()))


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"token_ids": [1, 2, 3, 10]}, "links[0].token_ids"),
        ({"token_ids": [1, 2, 3, -1]}, "links[0].token_ids"),
        ({"token_ids": [], "loss_mask": b"", "sampler_logprobs": []}, "links[0].token_ids"),
        ({"loss_mask": bytes([0, 1])}, "links[0]"),
        ({"sampler_logprobs": [0.0]}, "links[0]"),
        ({"token_ids": [1] * 7}, "links[0].token_ids"),
        ({"loss_mask": bytes([1, 0, 1, 1])}, "links[0].loss_mask"),
        ({"spans": []}, "links[0].spans"),
        ({"spans": [span(0, 2)]}, "links[0].spans"),
        ({"spans": [span(2, 5)]}, "links[0].spans"),
        ({"spans": [span(2, 4), span(3, 4)]}, "links[0].spans"),
        ({"spans": [span(2, 2), span(2, 4)]}, "links[0].spans"),
        (
            {"spans": [PolicySpan(sampled=PolicyVersion(epoch=9), context=OLD, start=2, end=4)]},
            "links[0].spans",
        ),
    ],
)
def test_an_unusable_rollout_names_its_field(changed: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        check(rollout(link(**changed)))
    assert caught.value.field == field


def test_a_log_prob_of_a_prompt_token_is_never_read() -> None:
    check(rollout(link(sampler_logprobs=[math.nan, 0.0, -0.5, -0.25])))


def test_a_rollout_without_tokens_or_of_an_unknown_version_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="links"):
        check(rollout())
    unknown = rollout(link())
    unknown.oldest.number = 99
    with pytest.raises(InvalidFieldError, match="oldest"):
        check(unknown)


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1e30])
def test_a_reward_that_is_no_usable_number_is_refused(reward: float) -> None:
    with pytest.raises(InvalidFieldError, match="reward"):
        check_reward(JournalRollout(reward=RewardRecord(reward=reward)))


def group(*records: JournalRollout, masked: tuple[int, ...] = ()) -> RolloutGroup:
    return RolloutGroup(
        group_id="g",
        phase="rl",
        position=0,
        task_id="t",
        seed=0,
        sequence=1,
        finished={record.rollout.index: record for record in records},
        masked=set(masked),
    )


def scored(index: int, reward: float) -> JournalRollout:
    return JournalRollout(rollout=rollout(link(), index=index), reward=RewardRecord(reward=reward))


def lost(index: int) -> JournalRollout:
    fault = RewardRecord(fault=RewardFault(reason="INFRA"))
    return JournalRollout(rollout=Rollout(rollout_id=f"g-{index}", index=index), reward=fault)


def test_a_batch_keeps_masked_rollouts_apart_and_the_order_of_groups() -> None:
    first = group(scored(1, 0.5), scored(0, 1.0), lost(2), masked=(2,))
    second = group(scored(0, 0.25))
    batch = build_policy_batch([first, second])
    assert batch.rewards.tolist() == [1.0, 0.5, 0.0, 0.25]
    assert batch.groups.tolist() == [0, 0, 0, 1]
    assert batch.valid.tolist() == [True, True, False, True]
    assert [s.rollout for s in batch.sequences] == [0, 1, 3]


def test_a_rollout_without_a_reward_is_refused_by_name_and_not_trained_as_one_of_0() -> None:
    with pytest.raises(WrongStateError, match="rollout g-1 has no reward"):
        build_policy_batch([group(scored(0, 1.0), lost(1), lost(2), masked=(2,))])


def test_a_group_is_as_old_as_its_oldest_valid_rollout() -> None:
    assert group(scored(0, 1.0), lost(1), masked=(1,)).oldest_position(KNOWN.get) == 4
    assert group(lost(0), masked=(0,)).oldest_position(KNOWN.get) is None


@pytest.mark.parametrize(("serving", "bound"), [(5, 4), (3, 3), (None, 4)])
def test_a_resumed_group_keeps_the_age_of_its_finished_siblings(
    serving: int | None, bound: int
) -> None:
    resumed = group(scored(0, 1.0))
    resumed.serving = serving
    assert resumed.oldest_bound(KNOWN.get) == bound


def test_a_group_whose_only_rollout_is_redrawn_is_as_old_as_what_runs() -> None:
    redrawn = group(scored(0, 1.0))
    assert redrawn.oldest_bound(KNOWN.get) == 4
    redrawn.remove_finished(0)
    assert redrawn.oldest_bound(KNOWN.get) is None
    redrawn.serving = 5
    assert redrawn.oldest_bound(KNOWN.get) == 5


def test_a_token_is_current_if_current_weights_sampled_it_and_its_context() -> None:
    mixed = link(
        spans=[
            PolicySpan(sampled=NEW, context=NEW, start=2, end=3),
            PolicySpan(sampled=NEW, context=OLD, start=3, end=4),
        ]
    )
    record = JournalRollout(rollout=rollout(mixed), reward=RewardRecord(reward=1.0))
    (sequence,) = build_policy_batch([group(record)], current={VersionId(1, 5)}).sequences
    assert sequence.is_current is not None
    assert sequence.is_current.tolist() == [False, False, True, False]


def test_faults_wait_for_their_drop_on_the_record() -> None:
    waiting = group(scored(0, 1.0), lost(1))
    assert waiting.faulty_indices() == [1]
    assert waiting.missing_indices(3) == [2]
    assert group(scored(0, 1.0), lost(1), masked=(1,)).faulty_indices() == []

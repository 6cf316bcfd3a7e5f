"""The account of rollouts: live and resumed it is the same fold, and the audit agrees with it."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.trainer.run_history import GROUP_SIZE, History, history, judged

from etude.common.errors import CorruptError
from etude.trainer.controller.journal.ledger import Ledger, LedgerState, resume_ledger


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_the_audit_of_a_legal_run_finds_nothing_and_agrees_with_the_ledger(seed: int) -> None:
    made = history(seed)
    found = judged(made)
    assert found.findings == []
    ledger = made.ledger
    assert (found.accepted, found.trained, found.queued) == (
        ledger.accepted,
        ledger.trained,
        ledger.queued,
    )
    assert found.dropped == ledger.dropped
    assert ledger.accepted == ledger.trained + ledger.dropped.total() + ledger.queued


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.data())
def test_a_ledger_resumed_anywhere_equals_the_one_that_was_never_stopped(
    seed: int, data: st.DataObject
) -> None:
    made = history(seed)
    cut = data.draw(st.integers(1, len(made.records)))
    while made.records[cut - 1].WhichOneof("body") == "batch":
        cut -= 1  # no checkpoint lies between a batch and its step
    before = Ledger()
    for record in made.records[:cut]:
        before.apply(copy.deepcopy(record))
        for step in list(before.batches):
            before.forget_batch(step)
    state = LedgerState.model_validate_json(before.checkpoint_state().model_dump_json())
    since = min([cut + 1, *state.live.values()])
    after = resume_ledger(state, copy.deepcopy(made.records[since - 1 :]), sequence=cut)
    whole = Ledger()
    for record in made.records:
        whole.apply(copy.deepcopy(record))
    trained_since = {step for step in whole.batches if step not in before.batches}
    assert after.live == whole.live
    assert after.consumed == whole.consumed
    assert (after.accepted, after.trained, after.dropped) == (
        whole.accepted,
        whole.trained,
        whole.dropped,
    )
    assert after.versions == whole.versions
    assert list(after.results.items()) == list(whole.results.items())
    assert after.batches == {
        step: whole.batches[step]
        for step in trained_since
        if any(
            r.sequence > cut and r.batch.step == step.number
            for r in made.records
            if r.WhichOneof("body") == "batch"
        )
    }


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.data())
def test_a_checkpoint_keeps_batches_that_its_weights_do_not_have(
    seed: int, data: st.DataObject
) -> None:
    made = history(seed)
    cut = data.draw(st.integers(1, len(made.records)))
    num_trained = data.draw(st.integers(0, 3))
    before, whole = Ledger(), Ledger()
    for record in made.records:
        for ledger in [whole] if record.sequence > cut else [whole, before]:
            ledger.apply(copy.deepcopy(record))
    for step in list(before.batches)[:num_trained]:
        before.forget_batch(step)
        whole.forget_batch(step)
    state = LedgerState.model_validate_json(before.checkpoint_state().model_dump_json())
    since = min([cut + 1, *state.live.values()])
    after = resume_ledger(state, copy.deepcopy(made.records[since - 1 :]), sequence=cut)
    assert list(after.batches.items()) == list(whole.batches.items())
    assert (after.live, after.consumed) == (whole.live, whole.consumed)
    assert list(after.results.items()) == list(whole.results.items())
    assert (after.accepted, after.trained, after.dropped) == (
        whole.accepted,
        whole.trained,
        whole.dropped,
    )


def test_the_result_of_a_task_is_the_mean_reward_of_siblings_that_were_trained() -> None:
    made = History()
    made.open()
    made.finish(group := made.admit(), faults=1)
    made.draw_again(group, 2, "slow", times=2)
    assert made.ledger.results == {}
    made.train([group])
    assert made.ledger.results == {"t0": 1.5}


def test_a_ledger_of_an_earlier_release_is_read() -> None:
    earlier = {"consumed": ["a"], "cursors": {"rl": 1}}
    assert LedgerState.model_validate(earlier) == LedgerState(consumed=["a"])


def test_a_rollout_delivered_twice_counts_once() -> None:
    made = History()
    made.open()
    made.finish(group := made.admit())
    again = copy.deepcopy(made.records[-1])
    made.ledger.apply(again)
    assert made.ledger.accepted == GROUP_SIZE
    assert made.ledger.queued == GROUP_SIZE
    assert group in made.ledger.live


def test_a_task_that_was_consumed_is_never_admitted_again() -> None:
    made = History()
    made.open()
    made.admit()
    made.admitted = 0
    with pytest.raises(CorruptError, match="t0 was admitted before"):
        made.admit()


def test_a_group_is_not_trained_twice() -> None:
    made = History()
    made.open()
    made.finish(group := made.admit())
    made.train([group])
    with pytest.raises(CorruptError, match="trains g0 again"):
        made.train([group])


def test_a_checkpoint_whose_journal_is_gone_is_refused() -> None:
    state = LedgerState(live={"g0": 5})
    with pytest.raises(CorruptError, match="g0"):
        resume_ledger(state, [], sequence=9)


def test_a_rollout_that_is_drawn_again_leaves_its_place_to_another() -> None:
    made = History()
    made.open()
    group = made.admit()
    made.finish(group)
    made.take_out(group, f"{group}-1", "suspect_policy")
    assert made.ledger.live[group].missing_indices(GROUP_SIZE) == [1]
    assert made.ledger.live[group].draws(GROUP_SIZE) == (0, 1, 0)
    assert made.ledger.dropped == {"suspect_policy": 1}
    assert (made.ledger.queued, made.ledger.discarded, made.ledger.masked) == (2, 1, 0)


def test_a_rollout_that_was_dropped_and_comes_again_is_not_counted_again() -> None:
    made = History()
    made.open()
    group = made.admit()
    made.finish(group)
    late = next(r for r in made.records if r.rollout.rollout.rollout_id == f"{group}-1")
    made.take_out(group, f"{group}-1", "quarantined_policy")
    made.ledger.apply(copy.deepcopy(late))
    assert made.ledger.live[group].missing_indices(GROUP_SIZE) == [1]
    assert made.ledger.accepted == GROUP_SIZE

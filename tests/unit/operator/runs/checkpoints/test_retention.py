"""Checkpoint retention."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.api.kinds import Checkpoint
from etude.common.api.run.checkpointing import Checkpointing, KeepBest
from etude.common.api.run.status import Resumption
from etude.operator.checkpoints.status import is_ready
from etude.operator.runs.checkpoints import lineage, retention


def checkpoint(step: int, reward: float | str | None, *, is_ready: bool = True) -> Checkpoint:
    text = reward if isinstance(reward, str) else f"{reward or 0.0:.6g}"
    metrics = {} if reward is None else {"reward": text}
    ready = {"type": "Ready", "status": "True" if is_ready else "False", "reason": "R"}
    return Checkpoint.model_validate(
        {
            "metadata": {"name": f"c{step}", "uid": f"u{step}"},
            "spec": {
                "runRef": {"name": "demo", "uid": "u"},
                "reason": "Scheduled",
                "source": {"uri": "s3://b/k", "manifestDigest": "0" * 64},
                "storage": {"uri": "s3://b"},
                "step": step,
                "metrics": metrics,
            },
            "status": {"conditions": [ready]},
        }
    )


@st.composite
def histories(draw: st.DrawFn) -> list[Checkpoint]:
    """Checkpoints of a run, newest first."""
    steps = draw(st.lists(st.integers(0, 500), max_size=12, unique=True))
    values = st.none() | st.sampled_from([0.0, 0.25, 0.5, 1.0])
    return [
        checkpoint(step, draw(values), is_ready=draw(st.booleans()))
        for step in sorted(steps, reverse=True)
    ]


# Put back to step 10 of its first branch; then to step 25 of the branch that began there.
ONCE = Resumption(number=1, step=10, branch=0)
TWICE = Resumption(number=2, step=25, branch=1, earlier=lineage.resume_points(ONCE))
# Then to step 5 of the first branch again, and at last to its start weights.
THRICE = Resumption(number=3, step=5, branch=0, earlier=lineage.resume_points(TWICE))
TO_ITS_START = Resumption(number=4, earlier=lineage.resume_points(THRICE))


@pytest.mark.parametrize(
    ("resumption", "kept", "left"),
    [
        (None, {(0, 99)}, set()),
        (Resumption(mode="Best"), {(0, 99)}, set()),
        (ONCE, {(0, 10), (1, 11), (1, 99)}, {(0, 11)}),
        (TWICE, {(0, 10), (1, 25), (2, 26)}, {(0, 11), (0, 20), (1, 26)}),
        (THRICE, {(0, 5), (3, 6)}, {(0, 6), (1, 3), (1, 25), (2, 4), (2, 26)}),
        (TO_ITS_START, {(4, 1)}, {(0, 1), (1, 11), (2, 26), (3, 6)}),
    ],
)
def test_the_past_of_a_run_is_the_way_from_its_present_branch_to_its_start(
    resumption: Resumption | None, kept: set[tuple[int, int]], left: set[tuple[int, int]]
) -> None:
    assert not {at for at in kept if lineage.is_off_lineage_at(*at, resumption)}
    assert {at for at in left if lineage.is_off_lineage_at(*at, resumption)} == left


def test_where_an_older_decision_is_forgotten_steps_alone_tell() -> None:
    forgotten = TWICE.model_copy(update={"earlier": ()})
    assert not lineage.is_off_lineage_at(0, 20, forgotten)
    assert lineage.is_off_lineage_at(0, 26, forgotten)


@given(histories(), st.integers(1, 4), st.none() | st.integers(1, 3))
def test_the_newest_and_the_best_stay_and_nothing_goes_before_enough_are_verified(
    history: list[Checkpoint], keep_last: int, best: int | None
) -> None:
    keep = None if best is None else KeepBest(metric="Reward", count=best)
    wanted = Checkpointing(keep_last=keep_last, keep_best=keep)
    gone = {c.metadata.name for c in retention.superseded_checkpoints(history, wanted)}
    verified = [c for c in history if is_ready(c)]
    assert not gone & {c.metadata.name for c in verified[:keep_last]}
    if len(verified) < keep_last:
        assert not gone
    top = retention.best_checkpoints(verified, keep)
    assert not gone & {c.metadata.name for c in top}
    left = [c for c in verified if c.metadata.name not in gone]
    assert len(left) <= keep_last + (best or 0)
    value = [retention.metric_of(c, "Reward") for c in verified]
    if best is not None and any(each is not None for each in value):
        assert max(v for v in value if v is not None) in {
            retention.metric_of(c, "Reward") for c in left
        }


def test_of_equal_figures_the_earlier_stays() -> None:
    history = [checkpoint(step, 0.5) for step in (30, 20, 10)]
    wanted = Checkpointing(keep_last=1, keep_best=KeepBest(metric="Reward"))
    assert [c.saved_state.step for c in retention.superseded_checkpoints(history, wanted)] == [20]


def test_the_smallest_may_be_best() -> None:
    history = [checkpoint(step, reward) for step, reward in ((30, 0.1), (20, 0.2), (10, 0.3))]
    wanted = Checkpointing(keep_last=1, keep_best=KeepBest(metric="Reward", mode="Min"))
    assert [c.saved_state.step for c in retention.superseded_checkpoints(history, wanted)] == [
        20,
        10,
    ]


@pytest.mark.parametrize("nonsense", ["abc", "", "nan", "inf", "-inf", "1e999", "0x1p3", "\u0661a"])
def test_text_that_is_no_number_is_no_figure(nonsense: str) -> None:
    history = [checkpoint(30, 0.5), checkpoint(20, nonsense), checkpoint(10, 0.9)]
    wanted = Checkpointing(keep_last=1, keep_best=KeepBest(metric="Reward"))
    assert [c.saved_state.step for c in retention.superseded_checkpoints(history, wanted)] == [20]

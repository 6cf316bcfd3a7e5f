"""Which checkpoints stay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.api.checkpointing import Checkpointing, KeepBest
from etude.common.api.kinds import Checkpoint
from etude.operator.runs import retention
from etude.operator.runs.seen import is_ready


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


@given(histories(), st.integers(1, 4), st.none() | st.integers(1, 3))
def test_the_newest_and_the_best_stay_and_nothing_goes_before_enough_are_verified(
    history: list[Checkpoint], keep_last: int, best: int | None
) -> None:
    keep = None if best is None else KeepBest(metric="Reward", count=best)
    wanted = Checkpointing(keep_last=keep_last, keep_best=keep)
    gone = {c.metadata.name for c in retention.superseded(history, wanted)}
    verified = [c for c in history if is_ready(c)]
    assert not gone & {c.metadata.name for c in verified[:keep_last]}
    if len(verified) < keep_last:
        assert not gone
    top = retention.best_of(verified, keep)
    assert not gone & {c.metadata.name for c in top}
    left = [c for c in verified if c.metadata.name not in gone]
    assert len(left) <= keep_last + (best or 0)
    value = [retention.figure_of(c, "Reward") for c in verified]
    if best is not None and any(each is not None for each in value):
        assert max(v for v in value if v is not None) in {
            retention.figure_of(c, "Reward") for c in left
        }


def test_of_equal_figures_the_earlier_stays() -> None:
    history = [checkpoint(step, 0.5) for step in (30, 20, 10)]
    wanted = Checkpointing(keep_last=1, keep_best=KeepBest(metric="Reward"))
    assert [c.saved.step for c in retention.superseded(history, wanted)] == [20]


def test_the_smallest_may_be_best() -> None:
    history = [checkpoint(step, reward) for step, reward in ((30, 0.1), (20, 0.2), (10, 0.3))]
    wanted = Checkpointing(keep_last=1, keep_best=KeepBest(metric="Reward", mode="Min"))
    assert [c.saved.step for c in retention.superseded(history, wanted)] == [20, 10]


@pytest.mark.parametrize("nonsense", ["abc", "", "nan", "inf", "-inf", "1e999", "0x1p3", "\u0661a"])
def test_text_that_is_no_number_is_no_figure(nonsense: str) -> None:
    history = [checkpoint(30, 0.5), checkpoint(20, nonsense), checkpoint(10, 0.9)]
    wanted = Checkpointing(keep_last=1, keep_best=KeepBest(metric="Reward"))
    assert [c.saved.step for c in retention.superseded(history, wanted)] == [20]

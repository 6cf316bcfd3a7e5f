"""The learning rate of each step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.api.run.phases import Optimizer
from etude.trainer.learner.optimiser import learning_rate


def rates(max_steps: int, **settings: object) -> list[float]:
    optimizer = Optimizer.model_validate({"learningRate": "1", **settings})
    return [
        learning_rate(step, optimizer=optimizer, max_steps=max_steps) for step in range(max_steps)
    ]


def test_warm_up_rises_to_the_peak() -> None:
    assert rates(6, warmupSteps=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_linear_reaches_its_final_fraction_at_the_last_step() -> None:
    assert rates(5, schedule="Linear", finalFraction="0.2") == pytest.approx(
        [1, 0.8, 0.6, 0.4, 0.2]
    )


def test_cosine_is_half_way_in_the_middle() -> None:
    found = rates(5, schedule="Cosine", finalFraction="0")
    assert found == pytest.approx([1, 0.8535534, 0.5, 0.1464466, 0])


def test_a_stable_phase_decays_at_its_end_only() -> None:
    found = rates(
        1_000,
        schedule="WarmupStableDecay",
        warmupSteps=30,
        decayStart="0.6",
        finalFraction="0.05",
    )
    assert found[0] == pytest.approx(1 / 30)
    assert found[29:601] == pytest.approx([1.0] * 572)
    assert found[800] == pytest.approx(1 - 0.95 * 200 / 399)
    assert found[-1] == pytest.approx(0.05)


def test_steps_past_the_end_keep_the_last_rate() -> None:
    optimizer = Optimizer.model_validate(
        {"learningRate": "2e-3", "schedule": "Linear", "finalFraction": "0.5"}
    )
    assert learning_rate(99, optimizer=optimizer, max_steps=10) == pytest.approx(1e-3)


@given(
    schedule=st.sampled_from(["Constant", "Linear", "Cosine", "WarmupStableDecay"]),
    warmup=st.integers(0, 20),
    max_steps=st.integers(1, 40),
)
def test_no_step_of_any_schedule_is_above_the_peak_or_below_zero(
    schedule: str, warmup: int, max_steps: int
) -> None:
    found = rates(max_steps, schedule=schedule, warmupSteps=warmup)
    assert all(0 <= rate <= 1 for rate in found)

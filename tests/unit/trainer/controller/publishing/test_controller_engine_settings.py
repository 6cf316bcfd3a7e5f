"""How long the controller waits for engines is what the run says."""

import pytest

from etude.common.api.run.weights import Weights
from etude.trainer.controller.publishing.engines import Engines


@pytest.mark.parametrize(
    ("weights", "timeout_s", "together_s"),
    [
        ({}, 600, None),
        ({"timeoutSeconds": 90}, 90, None),
        ({"timeoutSeconds": 90, "advanced": {"commit": "Together"}}, 90, 30),
        (
            {"timeoutSeconds": 90, "advanced": {"commit": "Together", "commitTimeoutSeconds": 7}},
            90,
            7,
        ),
    ],
)
def test_engines_are_waited_for_as_long_as_the_run_says(
    weights: dict[str, object], timeout_s: float, together_s: float | None
) -> None:
    found = Engines.of([], Weights.model_validate(weights))
    assert (found.timeout_s, found.together_s) == (timeout_s, together_s)

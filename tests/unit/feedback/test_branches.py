"""Branches of two tenants, trained through real windows: one is released, one harms the others."""

import numpy as np
import pytest
from tests.support.feedback.branch_simulation import HURRIED, PARTICULAR, BranchSimulation, Taste

from etude.feedback.release.decision import ReleaseAction


@pytest.mark.parametrize(
    ("taste", "action", "sentence"),
    [
        (PARTICULAR, ReleaseAction.START, "a gain is needed"),
        (HURRIED, ReleaseAction.REFUSE, "stopped by the gate: refused: success of general worse"),
    ],
)
def test_a_branch_is_released_if_it_gains_on_its_tasks_and_loses_nothing_on_others(
    taste: Taste, action: ReleaseAction, sentence: str
) -> None:
    found = BranchSimulation(taste, np.random.default_rng(7)).run(3)
    assert found.own.low > 0, "both are better for their own users"
    assert found.decision.action is action
    assert sentence in found.decision.sentence
    audit = found.audit
    assert (audit.findings, audit.num_trained, audit.num_waiting) == ([], 960, 0)
    assert audit.masked == {"OtherTenant": 120}

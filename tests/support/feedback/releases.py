"""Releases for tests: rules, versions, answers of the gate, and figures of users."""

from dataclasses import replace
from typing import Any

import numpy as np

from etude.common.evaluation.comparison import PairedDifference
from etude.common.release.channels import ServedVersion
from etude.feedback.experiments.user_moments import UserMoments
from etude.feedback.experiments.verdict import CanaryData
from etude.feedback.release.evidence import CanaryLook, Evidence, GateEvidence
from etude.feedback.release.rules import ReleaseRules
from etude.feedback.release.state import ReleaseState

RULES = ReleaseRules.model_validate(
    {
        "gate": {"margins": [{"metric": "success", "margin": 0.02}], "minTasks": 100},
        "canary": {
            "steps": [1_000, 2_500, 5_000],
            "stepSeconds": 600,
            "maxSeconds": 36_000,
            "usersPerArm": 2_000,
            "minUsers": 200,
            "primary": {"name": "edit persistence", "signal": "edit_persistence", "relevant": 0.02},
            "guardrails": [
                {
                    "name": "error rate",
                    "signal": "dissatisfied_followup",
                    "relevant": 0.01,
                    "isHigherBetter": False,
                }
            ],
            "signals": [
                {
                    "name": "complaints",
                    "signal": "dissatisfied_followup",
                    "relevant": 0.02,
                    "isHigherBetter": False,
                }
            ],
        },
    }
)


def with_policy(policy: str) -> ReleaseRules:
    return ReleaseRules.model_validate({**RULES.model_dump(), "policy": policy})


def version(number: int) -> ServedVersion:
    return ServedVersion(run_uid="run-1", epoch=1, number=number)


def gate(compared_with: int, difference: float = 0.01, *findings: str) -> GateEvidence:
    """An evaluation on 400 tasks with bounds of a point on both sides."""
    success = PairedDifference(
        num_tasks=400,
        num_unpaired=0,
        difference=difference,
        low=difference - 0.01,
        high=difference + 0.01,
    )
    return GateEvidence(
        compared_with=version(compared_with), comparisons={"success": success}, findings=findings
    )


def look(
    users: int = 800,
    *,
    kept: tuple[float, float] = (0.6, 0.6),
    errors: tuple[float, float] = (0.02, 0.02),
    complaints: tuple[float, float] = (0.1, 0.1),
    **fields: Any,
) -> CanaryLook:
    """As many users in each arm, of one event each, with shares of control and treatment."""
    shares = {"edit persistence": kept, "error rate": errors, "complaints": complaints}
    moments = {
        name: (_share(values[0], users), _share(values[1], users))
        for name, values in shares.items()
    }
    counts = {"control_users": users, "treatment_users": users} | fields
    return CanaryLook(experiment="", data=CanaryData(moments=moments, **counts))


def of_state(evidence: Evidence, state: ReleaseState) -> Evidence:
    """The evidence, a look being one at the users of the state's canary."""
    if isinstance(evidence, CanaryLook) and state.canary is not None:
        return replace(evidence, experiment=state.canary.experiment)
    return evidence


def _share(rate: float, users: int) -> UserMoments:
    return UserMoments.from_users(np.arange(users) < round(rate * users))

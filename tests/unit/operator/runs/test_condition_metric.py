"""What is wrong with a run is a series for as long as it is wrong, and as there is a run."""

from collections.abc import Callable
from typing import Any

from prometheus_client import REGISTRY

from etude.common.api.kinds import RLRun
from etude.operator.manifests import Ref
from etude.operator.runs.kind import RunGauges

Build = Callable[..., dict[str, Any]]
NAME = "troubled"


def run_with(run_body: Build, *conditions: tuple[str, str, str]) -> RLRun:
    body = run_body()
    body["metadata"]["name"] = NAME
    body["status"] = {
        "conditions": [
            {"type": kind, "status": status, "reason": reason, "message": "…"}
            for kind, status, reason in conditions
        ]
    }
    return RLRun.model_validate(body)


def shown() -> set[tuple[str, str]]:
    samples = [s for family in REGISTRY.collect() for s in family.samples]
    ours = [
        s.labels
        for s in samples
        if s.name == "etude_condition_unhealthy" and s.labels["name"] == NAME
    ]
    return {(labels["condition"], labels["reason"]) for labels in ours}


def test_a_condition_that_is_wrong_is_shown_until_it_is_right_or_the_run_is_gone(
    run_body: Build,
) -> None:
    gauges = RunGauges()
    late = ("CheckpointHealthy", "False", "StorageUnavailable")
    slow = ("Degraded", "True", "ReplicaLagging")
    gauges.export(run_with(run_body, late, slow, ("Progressing", "False", "WaitingForRoles")))
    assert shown() == {("CheckpointHealthy", "StorageUnavailable"), ("Degraded", "ReplicaLagging")}

    well = ("CheckpointHealthy", "True", "CheckpointVerified")
    gauges.export(run_with(run_body, well, ("Degraded", "True", "KeyframeOverdue")))
    assert shown() == {("Degraded", "KeyframeOverdue")}

    gauges.remove(Ref("RLRun", "lab", NAME))
    assert shown() == set()


def test_what_a_user_has_to_write_differently_and_what_is_over_are_no_trouble(
    run_body: Build,
) -> None:
    wrong = ("Accepted", "False", "InvalidParameters")
    RunGauges().export(run_with(run_body, wrong, ("Failed", "True", "RestartsExhausted")))
    assert shown() == set()

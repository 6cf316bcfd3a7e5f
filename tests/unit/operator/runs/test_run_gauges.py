"""What /metrics shows of one run, and what is left of it."""

from typing import Any

from prometheus_client import REGISTRY

from etude.common.api.kinds import RLRun
from etude.operator.manifests import Ref
from etude.operator.runs.kind import RunGauges

ABOUT = {"namespace": "lab", "run": "measured"}


def shown(role: str, state: str) -> float | None:
    return REGISTRY.get_sample_value("etude_run_pods", {**ABOUT, "role": role, "state": state})


def test_pods_of_each_role_are_shown_until_their_run_is_gone(run_body: Any) -> None:
    body = run_body()
    body["metadata"]["name"] = "measured"
    roles = [
        {"name": "trainer", "desired": 1, "ready": 1},
        {"name": "inference", "desired": 4, "ready": 3},
    ]
    gauges = RunGauges()
    gauges.export(RLRun.model_validate({**body, "status": {"roles": roles}}))
    assert [shown("inference", state) for state in ("desired", "ready")] == [4, 3]
    assert shown("trainer", "ready") == 1
    gauges.remove(Ref("RLRun", "lab", "measured"))
    assert shown("inference", "desired") is None
    assert shown("trainer", "ready") is None

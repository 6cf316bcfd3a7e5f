"""What a run is told of plans that its pools believe no more."""

from typing import Any

import pytest

from etude.operator.manifests import Ref
from etude.v1 import environments_pb2


@pytest.mark.parametrize(
    ("ratio", "said"), [(1.0, "Healthy"), (0.4, "PlanUnreliable"), (2.5, "PlanUnreliable")]
)
async def test_a_run_is_told_when_its_plans_are_believed_no_more(
    lab: Any, run_body: Any, ratio: float, said: str
) -> None:
    run = run_body()
    template = run["spec"]["roles"]["environments"][0]["poolTemplate"]
    template.pop("replicas")
    template |= {"maxReplicas": 4, "autoscaling": {"mode": "Predictive"}}
    lab.cluster.put(run)
    await lab.settle()
    uid = lab.cluster.objects()[Ref("RLRun", "lab", "demo")]["metadata"]["uid"]
    told = environments_pb2.WatchPoolResponse(
        told_unix_ms=1_000_000,
        plans=[environments_pb2.PlanFigures(run_id=uid, version=1, ratio=ratio)],
    )
    lab.peers.pools["demo-repos-broker-0.demo-repos-broker:7020"].say(told)
    await lab.settle()
    await lab.advance(5)
    found = next(c for c in lab.run().status.conditions if c.type == "Degraded")
    assert found.reason == said
    assert ("0.4 times" in found.message) == (ratio == 0.4)

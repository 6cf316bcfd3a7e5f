"""Use of plans: their accuracy, and the lead time of acting on them."""

from typing import Any

import pytest

from etude.common.api.pool.autoscaling import PredictiveScaling, ScaleToZero
from etude.operator.manifests import Ref
from etude.operator.pools.autoscaling.config import ScalingParameters
from etude.operator.pools.autoscaling.predictive import is_plan_current
from etude.operator.pools.autoscaling.values import DemandPlan
from etude.v1 import environments_pb2


@pytest.mark.parametrize(("until_s", "ends_s"), [(60.0, 60.0), (140.0, 140.0), (600.0, 150.0)])
def test_a_plan_counts_until_it_is_over_or_its_run_was_silent_for_the_grace_too(
    until_s: float, ends_s: float
) -> None:
    config = ScalingParameters(
        predictive=PredictiveScaling(plan_stale_seconds=120),
        scale_to_zero=ScaleToZero(grace_seconds=30),
    )
    plan = DemandPlan(run_id="r", version=1, heard_s=0.0, until_s=until_s, waves=())
    assert is_plan_current(plan, config, now_s=ends_s)
    assert not is_plan_current(plan, config, now_s=ends_s + 1.0)


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
    lab.cluster.upsert(run)
    await lab.settle()
    uid = lab.cluster.objects()[Ref("RLRun", "lab", "demo")]["metadata"]["uid"]
    told = environments_pb2.WatchPoolResponse(
        told_unix_ms=1_000_000,
        plans=[environments_pb2.PlanFigures(run_id=uid, version=1, ratio=ratio)],
    )
    lab.peers.pools["demo-repos-broker-0.demo-repos-broker:7020"].append(told)
    await lab.settle()
    await lab.advance(5)
    found = next(c for c in lab.run().status.conditions if c.type == "Degraded")
    assert found.reason == said
    assert ("0.4 times" in found.message) == (ratio == 0.4)


async def test_hosts_for_a_template_that_takes_long_to_fetch_are_begun_earlier(lab: Any) -> None:
    # A node is ready within a minute; its first environment of this template takes four more.
    began = {}
    for name, fetching_ms in (("quick", 0), ("slow", 240_000)):
        manifest = {
            "apiVersion": "etude.dev/v1alpha1",
            "kind": "EnvPool",
            "metadata": {"name": name, "namespace": "lab"},
            "spec": {
                "templates": [{"name": "python"}],
                "slotsPerReplica": 1,
                "maxReplicas": 20,
                "autoscaling": {"mode": "Predictive"},
            },
        }
        lab.cluster.upsert(manifest)
        await lab.settle()
        wave = environments_pb2.PlannedWave(
            template="python", count=8, start_unix_ms=1_000_000 + 240_000
        )
        first = environments_pb2.FirstStarts(
            template="python", count=500, p50_ms=fetching_ms, p95_ms=fetching_ms
        )
        told = environments_pb2.WatchPoolResponse(
            told_unix_ms=1_000_000,
            plans=[
                environments_pb2.PlanFigures(
                    run_id="stranger",
                    version=1,
                    heard_unix_ms=1_000_000,
                    until_unix_ms=2_000_000,
                    ratio=1.0,
                    waves=[wave],
                )
            ],
            first_starts=[first],
        )
        lab.peers.pools[f"{name}-broker-0.{name}-broker:7020"].append(told)
        await lab.settle()
        await lab.advance(2)
        began[name] = len([pod for pod in lab.names("Pod") if pod.startswith(f"{name}-node-")])
    assert began["quick"] == 1
    assert began["slow"] >= 8

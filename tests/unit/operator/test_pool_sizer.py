"""What a pool's sizer decides while brokers are silent, and as they are heard again."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from etude.common.api.kinds import EnvPool
from etude.operator.actions import Moment
from etude.operator.manifests import Manifest
from etude.operator.pools.provisions import Provisions
from etude.operator.pools.sizing import Size, Sizer
from etude.operator.reports.latest import PoolReport, Words
from etude.operator.scaling.config import TICK_S
from etude.operator.scaling.values import Cause
from etude.v1 import environments_pb2

WALL_S = 1.79e9


def pool(**scaling: Any) -> EnvPool:
    return EnvPool.understood(
        {
            "apiVersion": "etude.dev/v1alpha1",
            "kind": "EnvPool",
            "metadata": {"name": "repos", "namespace": "lab", "uid": "uid-repos"},
            "spec": {
                "templates": [{"name": "python"}],
                "slotsPerReplica": 1,
                "maxReplicas": 2_000,
                "autoscaling": {"mode": "Reactive", **scaling},
            },
        }
    )


def node(ordinal: int, *, is_ready: bool = True) -> Manifest:
    ready = {"type": "Ready", "status": "True" if is_ready else "False"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"repos-node-{ordinal}", "namespace": "lab", "uid": f"uid-{ordinal}"},
        "status": {"conditions": [ready]},
    }


@dataclass
class Scene:
    """A pool of nodes of one slot each, whose nodes come and go as a test says."""

    pool: EnvPool
    nodes: list[Manifest]
    now_s: float = 0.0
    sizer: Sizer = field(default_factory=lambda: Sizer(Provisions()))
    report: PoolReport = field(default_factory=PoolReport)

    def say(self, leased: int = 0, waiting: int = 0) -> None:
        members = [
            environments_pb2.NodeFigures(node_id=each["metadata"]["name"], held=int(n < leased))
            for n, each in enumerate(self.nodes)
        ]
        said = environments_pb2.WatchPoolResponse(
            told_unix_ms=round(1000 * self.now_s), leased=leased, waiting=waiting, members=members
        )
        self.report.said[0] = Words(said, self.now_s)

    def tick(self) -> Size:
        found = self.sizer.size(
            self.pool, self.nodes, self.report, {}, Moment(WALL_S + self.now_s, self.now_s)
        )
        self.now_s += TICK_S
        return found

    def last(self, seconds: int, **said: int) -> Size:
        """The same is said for a while; nothing, and brokers are silent."""
        for _ in range(round(seconds / TICK_S)):
            if said:
                self.say(**said)
            found = self.tick()
        return found


@pytest.mark.parametrize("silent_s", [20, 70, 130, 600])
@pytest.mark.parametrize("mode", ["Reactive", "Predictive"])
def test_the_first_words_after_a_silence_shrink_nothing(mode: str, silent_s: int) -> None:
    """A broker that was replaced has not heard its nodes yet, and knows of no lease."""
    scene = Scene(pool(mode=mode), [node(n) for n in range(38)])
    assert scene.last(300, leased=30).desired == 38
    found = scene.last(silent_s)
    assert found.decision is not None
    assert (found.desired, found.decision.cause) == (38, Cause.UNKNOWN)
    for _ in range(20):
        scene.say()
        found = scene.tick()
        assert (found.desired, found.retiring) == (38, ())
    assert scene.last(300, leased=0).desired < 38, "once the windows are full"

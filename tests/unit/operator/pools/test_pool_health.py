"""Unhealthy and unschedulable hosts."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.api.kinds import EnvPool
from etude.common.api.pool.spec import Health, Quarantine
from etude.operator.manifests import Manifest, Ref, uid
from etude.operator.pools.health import QUARANTINE_S, QUARANTINE_SHARE, HealthMonitor

KEY = Ref("EnvPool", "lab", "repos")
UNPLACED = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}


def body(replicas: int = 2, **spec: Any) -> Manifest:
    return {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "EnvPool",
        "metadata": {"name": "repos", "namespace": "lab"},
        "spec": {"templates": [{"name": "python"}], "replicas": replicas, **spec},
    }


def state(*, ready: bool = False, restarts: int = 0, waits_for: str = "") -> Manifest:
    """What the kubelet says of a node."""
    now: Manifest = {"waiting": {"reason": waits_for}} if waits_for else {"running": {}}
    container = {"name": "node", "ready": ready, "restartCount": restarts, "state": now}
    is_ready = {"type": "Ready", "status": "True" if ready else "False"}
    return {"phase": "Running", "conditions": [is_ready], "containerStatuses": [container]}


def of(lab: Any, ordinal: int) -> Ref:
    key = Ref("Pod", "lab", f"repos-node-{ordinal}")
    assert key in lab.cluster.objects()
    return key


def nodes(lab: Any) -> list[str]:
    return [name for name in lab.names("Pod") if "-node-" in name]


def status(lab: Any) -> Any:
    return EnvPool.model_validate(lab.cluster.objects()[KEY]).status


def condition(lab: Any, kind: str) -> tuple[str, str]:
    found = next(c for c in status(lab).conditions if c.type == kind)
    return found.status, found.reason


@pytest.fixture
async def pool_lab(lab: Any) -> Any:
    lab.cluster.upsert(body())
    await lab.settle()
    return lab


async def test_a_host_that_does_not_get_ready_is_kept_with_another_in_its_place(
    pool_lab: Any,
) -> None:
    pool_lab.cluster.set_status(of(pool_lab, 0), state())
    await pool_lab.settle()
    await pool_lab.advance(299)
    assert nodes(pool_lab) == ["repos-node-0", "repos-node-1"]
    await pool_lab.advance(1)
    assert nodes(pool_lab) == ["repos-node-0", "repos-node-1", "repos-node-2"]
    found = status(pool_lab)
    assert (found.quarantined, found.desired, found.ready_replicas) == (1, 2, 2)
    assert condition(pool_lab, "Degraded") == ("True", "NodesQuarantined")


async def test_one_that_is_ready_again_counts_again_and_one_too_many_goes(pool_lab: Any) -> None:
    pool_lab.cluster.set_status(of(pool_lab, 0), state())
    await pool_lab.settle()
    await pool_lab.advance(300)
    pool_lab.cluster.set_status(of(pool_lab, 0), state(ready=True))
    await pool_lab.settle()
    assert nodes(pool_lab) == ["repos-node-0", "repos-node-1"]
    assert status(pool_lab).quarantined == 0
    assert condition(pool_lab, "Degraded") == ("False", "Healthy")


async def test_quarantine_ends_after_an_hour(pool_lab: Any) -> None:
    pool_lab.cluster.set_status(of(pool_lab, 0), state())
    await pool_lab.settle()
    await pool_lab.advance(300)
    await pool_lab.advance(QUARANTINE_S)
    assert nodes(pool_lab) == ["repos-node-1", "repos-node-2"]


async def test_without_quarantine_a_host_that_is_not_well_is_made_anew(lab: Any) -> None:
    lab.cluster.upsert(body(health={"quarantine": "Never", "readinessGraceSeconds": 30}))
    await lab.settle()
    before = uid(lab.cluster.objects()[of(lab, 0)])
    lab.cluster.set_status(of(lab, 0), state())
    await lab.settle()
    await lab.advance(30)
    assert nodes(lab) == ["repos-node-0", "repos-node-1"]
    assert uid(lab.cluster.objects()[of(lab, 0)]) != before
    assert status(lab).quarantined == 0


@pytest.mark.parametrize(("restarts", "kept"), [(2, 0), (3, 1)])
async def test_a_host_may_restart_so_often_in_a_row(lab: Any, restarts: int, kept: int) -> None:
    # It has been ready after its first two restarts, so these count no more.
    lab.cluster.upsert(body(health={"crashLoopThreshold": 3}))
    await lab.settle()
    lab.cluster.set_status(of(lab, 0), state(ready=True, restarts=2))
    await lab.settle()
    crashed = state(restarts=2 + restarts, waits_for="CrashLoopBackOff")
    lab.cluster.set_status(of(lab, 0), crashed)
    await lab.settle()
    assert status(lab).quarantined == kept


async def test_an_image_may_take_as_long_as_it_takes(pool_lab: Any) -> None:
    pool_lab.cluster.set_status(of(pool_lab, 0), state(waits_for="ContainerCreating"))
    await pool_lab.settle()
    await pool_lab.advance(10_000)
    assert status(pool_lab).quarantined == 0


async def test_a_pool_creates_no_more_hosts_while_one_finds_no_node(lab: Any) -> None:
    lab.cluster.upsert(body(3))
    await lab.settle()
    lab.cluster.set_status(of(lab, 2), {"phase": "Pending", "conditions": [UNPLACED]})
    await lab.settle()
    assert status(lab).unschedulable == 1
    assert condition(lab, "Scheduled") == ("False", "Unschedulable")
    lab.cluster.upsert(body(4))
    await lab.settle()
    assert len(nodes(lab)) == 4, "somebody may be adding machines as they are asked for"
    lab.cluster.set_status(of(lab, 3), {"phase": "Pending", "conditions": [UNPLACED]})
    await lab.settle()
    await lab.advance(60)
    lab.cluster.upsert(body(6))
    await lab.settle()
    assert len(nodes(lab)) == 4
    for ordinal in (2, 3):
        lab.cluster.set_status(of(lab, ordinal), state(ready=True))
    await lab.settle()
    assert len(nodes(lab)) == 6
    assert condition(lab, "Scheduled") == ("True", "Scheduled")


async def test_a_pool_that_shall_have_no_host_keeps_none_to_be_looked_at(pool_lab: Any) -> None:
    pool_lab.cluster.set_status(of(pool_lab, 0), state())
    await pool_lab.settle()
    await pool_lab.advance(300)
    pool_lab.cluster.upsert(body(0))
    await pool_lab.settle()
    assert nodes(pool_lab) == []


async def test_a_limit_of_hosts_holds_for_those_in_quarantine_too(lab: Any) -> None:
    lab.cluster.upsert(body(maxReplicas=2))
    await lab.settle()
    lab.cluster.set_status(of(lab, 0), state())
    await lab.settle()
    await lab.advance(300)
    assert (len(nodes(lab)), status(lab).quarantined) == (2, 1)


STATES: tuple[Callable[[], Manifest], ...] = (
    lambda: state(ready=True),
    state,
    lambda: state(restarts=9, waits_for="CrashLoopBackOff"),
    lambda: {"phase": "Pending", "conditions": [UNPLACED]},
)


@given(
    st.lists(st.lists(st.sampled_from(range(len(STATES))), min_size=1, max_size=30), max_size=8),
    st.sampled_from(Quarantine),
)
def test_few_are_kept_and_nobody_is_both_kept_and_given_up(
    passes: list[list[int]], quarantine: Quarantine
) -> None:
    ward, health = HealthMonitor(), Health(quarantine=quarantine)
    for step, chosen in enumerate(passes):
        seen = [
            {"metadata": {"name": f"n{n}", "uid": f"u{n}"}, "status": STATES[each]()}
            for n, each in enumerate(chosen)
        ]
        found = ward.observe(seen, health, now_s=400.0 * step)
        well = {f"n{n}" for n, each in enumerate(chosen) if each == 0}
        assert not well & {*found.quarantined, *found.to_delete}
        assert not set(found.quarantined) & set(found.to_delete)
        most = 0 if quarantine is Quarantine.NEVER else len(chosen)
        assert len(found.quarantined) <= most
        if step == 0:
            assert len(found.quarantined) <= max(1, len(chosen) // QUARANTINE_SHARE)


async def test_an_image_that_does_not_come_is_told_though_a_keeper_waits_for_it(
    pool_lab: Any,
) -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off"}}
    status = state(waits_for="PodInitializing")
    status["initContainerStatuses"] = [{"name": "certificates", "state": waiting}]
    pool_lab.cluster.set_status(of(pool_lab, 0), status)
    await pool_lab.settle()
    assert condition(pool_lab, "Degraded") == ("True", "ImagePullFailed")

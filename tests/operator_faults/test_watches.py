"""The operator whose view of the API server is late, doubled, holed, old, or silent."""

import asyncio

import pytest
from tests.operator_faults import faults
from tests.operator_faults.faults import CutInside, Drop, Gone, HalfOpen, Hide, Late, Travel
from tests.operator_faults.lab import SHORT, Lab, Running, Scene
from tests.operator_faults.stories import References, told
from tests.operator_faults.workloads import CREATE, POOL, UPDATE, pool

OURS = ("rlruns", "envpools", "checkpoints")
CHECKS = SHORT | {
    "etude.operator.kube.watches.CHECK_EVERY_S": 1.0,
    "etude.operator.kube.watches.CHECK_GRACE_S": 0.5,
}
"""A silent watch is found out after a second here, and after five minutes elsewhere."""


@pytest.mark.parametrize("resource", ["pods", "statefulsets", "jobs", *OURS])
@pytest.mark.long
async def test_p01_events_that_come_all_at_once_at_the_end_lead_to_the_same_end(
    lab: Lab, references: References, resource: str
) -> None:
    async with told(lab, UPDATE, references) as story:
        hide = Hide({resource})
        story.proxy.event_faults.append(hide)
        story.proxy.break_streams()
        acting = asyncio.create_task(UPDATE.act(story.scene))
        # Nothing moves any more without the events, or everything is done without them.
        await story.scene.scenery.quiet(3.0)
        hide.end()
        await acting
        await story.reaches_the_reference()


async def test_p01_events_that_come_late_and_in_another_order_lead_to_the_same_end(
    lab: Lab, references: References
) -> None:
    async with told(lab, UPDATE, references, [Late(0.15)]) as story:
        await UPDATE.act(story.scene)
        await story.reaches_the_reference()


async def test_p01_events_that_come_twice_lead_to_the_same_end(
    lab: Lab, references: References
) -> None:
    async with told(lab, CREATE, references, [faults.twice]) as story:
        await CREATE.act(story.scene)
        await story.reaches_the_reference()


@pytest.mark.parametrize("resources", [("pods", "statefulsets", "jobs"), OURS])
async def test_p01_events_that_never_come_are_found_out_by_the_check(
    lab: Lab, references: References, resources: tuple[str, ...]
) -> None:
    drop = Drop(resources)
    async with told(lab, UPDATE, references, [drop], constants=CHECKS) as story:
        await UPDATE.act(story.scene)
        await story.reaches_the_reference()
    assert drop.dropped


async def test_p09_a_watch_that_breaks_off_inside_an_object_is_begun_again(
    lab: Lab, references: References
) -> None:
    cut = CutInside(times=6)
    async with told(lab, UPDATE, references, [cut]) as story:
        await UPDATE.act(story.scene)
        await story.reaches_the_reference()
    assert cut.cuts


async def test_p09_a_watch_that_is_open_and_silent_is_found_out_by_the_check(
    lab: Lab, references: References
) -> None:
    silent = HalfOpen({"pods", "statefulsets", "jobs", *OURS})
    async with told(lab, UPDATE, references, [silent], constants=CHECKS) as story:
        silent.is_silent = True
        await UPDATE.act(story.scene)
        await story.reaches_the_reference()
    assert silent.swallowed


@pytest.mark.parametrize("is_event", [False, True])
async def test_p09_a_version_that_is_too_old_leads_to_a_new_list(
    lab: Lab, references: References, *, is_event: bool
) -> None:
    gone = Gone(times=20, is_event=is_event)
    async with told(lab, UPDATE, references) as story:
        story.proxy.faults.append(gone)
        story.proxy.break_streams()
        await UPDATE.act(story.scene)
        await story.reaches_the_reference()
    assert gone.hits


@pytest.mark.parametrize("is_leased", [False, True])
async def test_p08_an_operator_that_sees_an_old_cluster_neither_makes_nor_deletes_too_much(
    lab: Lab, *, is_leased: bool
) -> None:
    async with lab.scene() as scene, lab.acting(scene) as operator:
        await scene.create(pool(3))
        await _has_nodes(scene, 3)
        small = await scene.merge("EnvPool", POOL, {"spec": {"replicas": 1}})
        await _has_nodes(scene, 1)
        await scene.merge("EnvPool", POOL, {"spec": {"replicas": 3}})
        await _has_nodes(scene, 3)
        before = _uids(scene)
        scene.kubelet.leased |= set(before) if is_leased else set()
        await operator.kill()
        # At that moment one node was wanted, and there were three others of the same names.
        travel = Travel(small["metadata"]["resourceVersion"])
        operator.proxy.faults.append(travel)
        operator.proxy.event_faults.append(travel.events)
        known = len(operator.proxy.log)
        await operator.start()
        if not is_leased:
            await scene.api_calls(lambda: 409 in _deletions(operator, known))
        await scene.api_calls(lambda: travel.lists > 0)
        await scene.scenery.quiet(5.0)
        travel.is_over.set()
        await scene.scenery.quiet(3.0)
        assert _uids(scene) == before
        # Nodes of the same names that the broker calls empty are tried, by uids that are gone.
        assert set(_deletions(operator, known)) == (set() if is_leased else {409})
        await _has_nodes(scene, 3)
        assert scene.problems() == []


async def _has_nodes(scene: Scene, count: int) -> None:
    def settled() -> bool:
        status = scene.get("EnvPool", POOL).get("status", {})
        return bool(status.get("readyReplicas") == count == len(_uids(scene)) - 1)

    await scene.until(settled)


def _deletions(operator: Running, known: int) -> list[int | str]:
    """How deletions were answered, after so many entries of the log."""
    return [each.outcome for each in operator.proxy.log[known:] if each.call.verb == "delete"]


def _uids(scene: Scene) -> dict[str, str]:
    """Of the nodes and the broker."""
    found = scene.scenery.every("Pod")
    return {each["metadata"]["name"]: each["metadata"]["uid"] for each in found}

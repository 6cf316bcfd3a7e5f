"""Images that plans expect: which host pulls which, and where their groups start."""

import time

import pytest
from tests.support.environments.brokers import launched, request, started

from etude.common.api.pool.images import TaskImages
from etude.common.api.pool.spec import EnvPoolSpec, Template
from etude.common.errors import InvalidFieldError
from etude.common.plans.registry import MAX_IMAGES
from etude.envserver.broker.broker import Broker
from etude.envserver.broker.host_client import MemoryHostClient
from etude.v1 import environments_pb2, plan_pb2

SPEC = EnvPoolSpec(
    templates=(Template(name="python"),), images=TaskImages(sources=("ghcr.io/acme",))
)


def digest(number: int) -> str:
    return f"sha256:{number:08x}{0:056x}"


def reference(number: int) -> str:
    return f"ghcr.io/acme/shop@{digest(number)}"


def plan(*images: int, version: int = 1, template: str = "python") -> plan_pb2.RolloutPlan:
    """Of the images alone, as a run knows before its first waves."""
    now_ms = round(1000 * time.time())
    return plan_pb2.RolloutPlan(
        version=version,
        made_unix_ms=now_ms,
        valid_until_unix_ms=now_ms + 60_000,
        images=[plan_pb2.PlannedImage(template=template, image=reference(n)) for n in images],
    )


async def targets(broker: Broker, nodes: MemoryHostClient, *endpoints: str) -> dict[str, list[str]]:
    """Images that each host is asked to pull, a second later."""
    broker.image_targets._decided_s = 0.0
    await broker.tick()
    answers = {name: broker.heartbeat(nodes.heartbeat(name)) for name in endpoints}
    return {name: [each.image for each in answer.images] for name, answer in answers.items()}


async def test_each_planned_image_has_one_host_and_keeps_it() -> None:
    nodes = MemoryHostClient(slots=10)
    broker = started(nodes, "n1", "n2")
    broker.report_plan("run", plan(*range(8)))
    first = await targets(broker, nodes, "n1", "n2")
    assert sorted(image for images in first.values() for image in images) == [
        reference(n) for n in range(8)
    ]
    assert all(first.values()), "both hosts pull"
    broker.heartbeat(nodes.heartbeat("n3"))
    broker.report_plan("run", plan(*range(8), version=2))
    again = await targets(broker, nodes, "n1", "n2", "n3")
    assert {name: again[name] for name in first} == first


async def test_images_of_two_runs_come_in_turn_and_each_once() -> None:
    nodes = MemoryHostClient(slots=10)
    broker = started(nodes, "n1")
    broker.report_plan("one", plan(1, 2, 3))
    broker.report_plan("two", plan(7, 2))
    found = await targets(broker, nodes, "n1")
    assert found["n1"] == [reference(n) for n in (1, 7, 2, 3)]


async def test_a_group_starts_where_its_image_is_and_not_where_it_is_still_pulled() -> None:
    nodes = MemoryHostClient(slots=10)
    broker = started(nodes, "n1", "n2", "n3", spec=SPEC)
    pulling, having = nodes.heartbeat("n1"), nodes.heartbeat("n2")
    pulling.pulled_images.append(digest(4))
    having.images.append(digest(4))
    broker.heartbeat(pulling)
    broker.heartbeat(having)
    outcomes = await launched(broker, request("a", count=1, group_id="g", image=reference(4)))
    assert [each.lease.endpoint for each in outcomes] == ["n2"]


async def test_a_plan_with_an_image_without_a_digest_is_refused_by_its_place() -> None:
    broker = started(MemoryHostClient(slots=10))
    told = plan(1)
    told.images.add(template="python", image="ghcr.io/acme/shop:latest")
    with pytest.raises(InvalidFieldError, match=r"plan\.images\[1\]\.image"):
        broker.report_plan("run", told)
    with pytest.raises(InvalidFieldError, match=r"plan\.images\[0\]\.template"):
        broker.report_plan("run", plan(1, template="cobol"))
    with pytest.raises(InvalidFieldError, match="more than"):
        broker.report_plan("run", plan(*range(MAX_IMAGES + 1)))


async def test_images_alone_say_nothing_about_how_accurate_a_plan_is() -> None:
    nodes = MemoryHostClient(slots=10)
    broker = started(nodes, "n1")
    broker.report_plan("run", plan(1))
    await launched(broker, request("a", count=4, group_id="g"))
    broker.report_plan("run", plan(2, version=2))
    assert broker.warm_targets.plans.ratio("run") == 1.0


async def test_nothing_of_a_template_is_kept_ready_for_environments_of_images() -> None:
    nodes = MemoryHostClient(slots=10)
    broker = started(nodes, "n1", spec=SPEC)
    told = plan(1)
    told.waves.add(template="python", count=8, start_s=1.0, with_image=6)
    broker.report_plan("run", told)
    broker.warm_targets._decided_s = 0.0
    await broker.tick()
    answer = broker.heartbeat(nodes.heartbeat("n1"))
    assert sum(each.paused_clones for each in answer.warm) == 2
    assert broker.warm_targets.plans.peak(now_s=time.monotonic()) == 8, "but slots are"
    beat = nodes.heartbeat("n1")
    beat.begun.add(template=f"python@{digest(1)}", start=environments_pb2.START_SPAWN, start_ms=9)
    broker.heartbeat(beat)
    assert broker.warm_targets._watermarks == {}

"""Queue priority of a run: by a WorkloadPriorityClass, or by its pods' PriorityClass."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.operator.runs.capacity.test_kueue_quota import KINDS, QUEUED, WORKLOAD

from etude.operator.builders.platform import Platform


@pytest.fixture
def platform(platform: Platform) -> Platform:
    return replace(platform, integrations=frozenset({"kueue"}))


@pytest.fixture
def queues(lab: Any) -> Any:
    """A cluster with Kueue."""
    lab.cluster.integrations = KINDS
    return lab


async def test_a_priority_is_that_of_its_class_once_there_is_one(
    queues: Any, run_body: Any
) -> None:
    queues.cluster.upsert(run_body(scheduling={**QUEUED, "workloadPriorityClassName": "high"}))
    await queues.settle()
    assert WORKLOAD not in queues.cluster.objects()
    assert queues.condition("QuotaReserved") == ("False", "Inadmissible")
    metadata = {"name": "high", "namespace": "default"}
    queues.cluster.upsert({"kind": "WorkloadPriorityClass", "metadata": metadata, "value": 1000})
    await queues.advance(30)
    spec = queues.cluster.objects()[WORKLOAD]["spec"]
    assert spec["priority"] == 1000
    assert spec["priorityClassRef"] == {
        "group": "kueue.x-k8s.io",
        "kind": "WorkloadPriorityClass",
        "name": "high",
    }


HIGH = {"priorityClassName": "high"}


@pytest.mark.parametrize(
    ("scheduled", "laid_over", "name"), [(HIGH, {}, "high"), ({}, {}, "usual"), ({}, HIGH, "high")]
)
async def test_without_a_class_of_its_own_a_place_in_the_queue_is_that_of_the_pods(
    queues: Any, run_body: Any, scheduled: Any, laid_over: Any, name: str
) -> None:
    """A class that is everybody's counts for pods that name none."""
    classes = {"high": {"value": 1000}, "usual": {"value": 10, "globalDefault": True}}
    for each, said in classes.items():
        metadata = {"name": each, "namespace": "default"}
        queues.cluster.upsert({"kind": "PriorityClass", "metadata": metadata, **said})
    body = run_body(scheduling={**QUEUED, **scheduled})
    body["spec"]["roles"]["inference"]["podTemplate"] = {"spec": laid_over}
    queues.cluster.upsert(body)
    await queues.settle()
    spec = queues.cluster.objects()[WORKLOAD]["spec"]
    assert spec["priority"] == classes[name]["value"]
    of_pods = {"group": "scheduling.k8s.io", "kind": "PriorityClass", "name": name}
    assert spec["priorityClassRef"] == of_pods

"""Any order of events, any stale cache, any crash: the same end state, nothing twice."""

from collections.abc import Callable
from typing import Any

import pytest

from etude.operator.manifests import Ref
from etude.v1 import run_pb2

VOLATILE = {
    *("uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "ownerReferences"),
    *("lastTransitionTime", "verifiedTime", "startTime", "completionTime", "since", "time"),
    *("reported", "etude.dev/applied"),
}
"""What differs between two runs of the same story."""


async def story(lab: Any, run_body: Any) -> None:
    """Create, train, checkpoint three times, lose the trainer, suspend, resume, finish."""
    spec = {"checkpointing": {"keepLast": 1}}
    lab.cluster.upsert(run_body(**spec))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    for step in (10, 20):
        await lab.tell_checkpoint(step)
        await lab.finish_jobs()
    await lab.finish_jobs()
    lab.new_controller()
    lab.end("demo-trainer-0", exit_code=137)
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=20)
    lab.cluster.upsert(run_body(suspend=True, **spec))
    await lab.settle()
    await lab.tell_checkpoint(21)
    await lab.say(state=run_pb2.RUN_STATE_SUSPENDED, step=21)
    await lab.finish_jobs()
    await lab.finish_jobs()
    lab.new_controller()
    lab.cluster.upsert(run_body(**spec))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=22)
    await lab.say(state=run_pb2.RUN_STATE_DONE, step=40)
    await lab.advance(20)
    for _ in range(3):
        await lab.finish_jobs()


def end_state(lab: Any) -> dict[Ref, Any]:
    return {key: _stable(value) for key, value in sorted(lab.cluster.objects().items())}


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _stable(item) for key, item in value.items() if key not in VOLATILE}
        if "run.json" in kept or "pool.json" in kept:
            return {}
        return kept
    return [_stable(item) for item in value] if isinstance(value, list) else value


@pytest.fixture
async def reference(lab_of: Callable[..., Any], run_body: Any) -> Any:
    lab = lab_of()
    await story(lab, run_body)
    return lab


async def test_the_story_ends_well(reference: Any) -> None:
    status = reference.run().status
    assert status.phase == "Succeeded"
    assert (status.attempt, status.restarts.total) == (1, 1)
    kinds = {key.kind for key in reference.cluster.objects()}
    assert "Pod" not in kinds
    assert [key.name for key in end_state(reference) if key.kind == "Checkpoint"] == [
        "demo-s00000021-000000"
    ]


@pytest.mark.parametrize("seed", range(8))
async def test_any_order_of_events_leads_to_the_same_end(
    seed: int, reference: Any, lab_of: Callable[..., Any], run_body: Any
) -> None:
    lab = lab_of(seed=seed)
    await story(lab, run_body)
    assert end_state(lab) == end_state(reference)


@pytest.mark.parametrize("seed", range(8))
async def test_a_slow_watch_leads_to_the_same_end_and_creates_nothing_twice(
    seed: int, reference: Any, lab_of: Callable[..., Any], run_body: Any
) -> None:
    lab = lab_of(is_lagging=True, seed=seed)
    await story(lab, run_body)
    assert end_state(lab) == end_state(reference)


@pytest.mark.parametrize("offset", range(4))
async def test_a_kill_at_any_write_is_recovered_from(
    offset: int, reference: Any, lab_of: Callable[..., Any], run_body: Any
) -> None:
    wanted = end_state(reference)
    positions = range(1 + offset, len(reference.writes) + 1, 4)
    kills = 0
    for kill_at in positions:
        lab = lab_of(seed=kill_at)
        lab.kill_at = kill_at
        await story(lab, run_body)
        kills += lab.kills
        found = end_state(lab)
        different = [key for key in wanted | found if wanted.get(key) != found.get(key)]
        assert not different, (kill_at, reference.writes[kill_at - 1])
        lab.followers.unfollow_all()
    # Another order of events may need a few writes less.
    assert kills >= len(positions) - 2


async def test_an_attempt_only_grows_and_no_pod_runs_while_suspended(
    lab_of: Callable[..., Any], run_body: Any
) -> None:
    lab = lab_of(seed=3)
    attempts: list[int] = []
    violations: list[str] = []

    def check(manifest: Any) -> None:
        run = lab.cluster.objects().get(Ref("RLRun", "lab", "demo"), {})
        status = run.get("status", {})
        attempts.append(status.get("attempt", 0))
        found = {c["type"]: c["status"] for c in status.get("conditions", ())}
        if found.get("Complete") == found.get("Failed") == "True":
            violations.append("both terminal conditions")
        is_current = status.get("observedGeneration") == run.get("metadata", {}).get("generation")
        if found.get("Suspended") == "True" and is_current and lab.pods("trainer"):
            violations.append("a pod while suspended")

    lab.cluster.subscribe(check)
    await story(lab, run_body)
    assert violations == []
    assert attempts == sorted(attempts)


async def test_a_new_operator_says_nothing_new_before_it_has_heard_the_controller(
    lab: Any, run_body: Any
) -> None:
    lab.cluster.upsert(run_body())
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_CHECKPOINTING, step=1)
    assert lab.condition("Ready")[0] == "True"
    before, writes = lab.run().status, len(lab.writes)
    assert before.phase == "Checkpointing"
    said = lab.peers.runs.copy()
    lab.new_controller()
    await lab.kill()
    await lab.settle()
    assert lab.writes[writes:] == []
    lab.peers.runs.update(said)
    await lab.kill()
    await lab.settle()
    assert lab.writes[writes:] == [], "the controller says what is known"
    assert lab.run().status == before


async def test_a_controller_that_a_new_operator_never_hears_is_unreachable(
    lab: Any, run_body: Any
) -> None:
    lab.cluster.upsert(run_body())
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    lab.new_controller()
    await lab.kill()
    await lab.settle()
    await lab.advance(31)
    assert lab.condition("Ready") == ("False", "ControllerUnreachable")
    assert lab.condition("Progressing") == ("False", "ControllerUnreachable")

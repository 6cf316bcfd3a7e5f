"""How long pods take to start, as their own status tells it."""

from typing import Any

from prometheus_client import REGISTRY

from etude.operator.controller.pod_startup import PodStartups, startup_stages


def at(second: int) -> str:
    return f"2026-01-01T00:00:{second:02d}Z"


def pod(
    uid: str, *, is_ready: bool, started: tuple[int, ...] = (9, 7), role: str = "edge"
) -> dict[str, Any]:
    conditions = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": at(5)}]
    word = "True" if is_ready else "False"
    conditions.append({"type": "Ready", "status": word, "lastTransitionTime": at(30)})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "p",
            "uid": uid,
            "creationTimestamp": at(1),
            "labels": {"etude.dev/role": role},
        },
        "status": {
            "conditions": conditions,
            "containerStatuses": [{"state": {"running": {"startedAt": at(s)}}} for s in started],
        },
    }


def test_each_stage_ends_where_the_next_begins() -> None:
    found = startup_stages(pod("u", is_ready=True))
    assert found == {"scheduled": 4.0, "started": 4.0, "ready": 21.0}


def test_clocks_that_differ_make_no_stage_shorter_than_nothing() -> None:
    assert startup_stages(pod("u", is_ready=True, started=(3,)))["started"] == 0.0


def test_a_start_of_which_a_moment_is_missing_is_not_counted() -> None:
    assert startup_stages(pod("u", is_ready=True, started=())) == {}
    assert startup_stages(pod("u", is_ready=False)) == {}


def counted(role: str = "edge") -> float:
    about = {"role": role, "stage": "ready"}
    return REGISTRY.get_sample_value("etude_startup_seconds_count", about) or 0.0


def test_a_start_is_counted_once_and_only_if_it_was_seen() -> None:
    startups, before = PodStartups(), counted()
    startups.observe(pod("old", is_ready=True))
    assert counted() == before
    startups.observe(pod("new", is_ready=False))
    startups.observe(pod("new", is_ready=True))
    startups.observe(pod("new", is_ready=True))
    assert counted() == before + 1


def test_a_pod_that_is_ready_again_has_not_started_again() -> None:
    startups, before = PodStartups(), counted()
    for is_ready in (False, True, False, True):
        startups.observe(pod("flapping", is_ready=is_ready))
    startups.observe(pod("old", is_ready=True))
    startups.observe(pod("old", is_ready=False))
    startups.observe(pod("old", is_ready=True))
    assert counted() == before + 1


def test_nothing_is_kept_of_a_pod_that_is_gone() -> None:
    startups = PodStartups()
    for is_ready in (False, True):
        startups.observe(pod("gone", is_ready=is_ready))
        startups.forget(pod("gone", is_ready=is_ready))
    assert startups == PodStartups()


def test_the_pods_of_others_make_no_series() -> None:
    startups = PodStartups()
    for is_ready in (False, True):
        startups.observe(pod("theirs", is_ready=is_ready, role="anything at all"))
    assert counted("anything at all") == 0

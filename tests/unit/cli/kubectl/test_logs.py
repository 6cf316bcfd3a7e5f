"""Whose logs are shown, and how a line of somebody else's text is shown."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.kube.observed_runs import condition, ended, pod, pool, run, seen
from tests.support.kube.stub_kubectl import Said, StubKubectl, complaint, shown

from etude.cli.kubectl.logs import LogLine, PodFilter, container_flag, select_pods
from etude.cli.kubectl.manifests import name_of
from etude.common.errors import UserError

ALL = seen(
    run(), pod(), pod("inference"), pool(), pod("node", pool="swe"), pod("node", pool="another")
)


def test_the_pods_of_a_run_are_its_own_and_those_of_its_pools() -> None:
    assert [name_of(each) for each in select_pods(ALL, PodFilter())] == [
        "demo-inference-0",
        "demo-trainer-0",
        "swe-node-0",
    ]
    assert [name_of(each) for each in select_pods(ALL, PodFilter(role="node"))] == ["swe-node-0"]


@pytest.mark.parametrize("wanted", [PodFilter(role="judge"), PodFilter(attempt=3)])
def test_a_role_or_attempt_without_pods_is_answered_with_what_there_is(wanted: PodFilter) -> None:
    with pytest.raises(UserError) as refused:
        select_pods(ALL, wanted)
    assert (
        "inference (attempt 0), node (attempt 0), trainer (attempt 0)" in refused.value.problem.fix
    )


def test_a_run_without_pods_leads_to_why() -> None:
    with pytest.raises(UserError, match="kubectl etude why demo"):
        select_pods(seen(run()), PodFilter())


def test_a_line_does_nothing_to_the_terminal() -> None:
    assert LogLine("", "demo-trainer-0", "a\x1b[2Jb").format() == "demo-trainer-0  a␛[2Jb"


def test_the_container_of_the_role_is_read_whatever_stands_beside_it() -> None:
    beside = [{"name": "mesh"}, {"name": "trainer"}]
    assert container_flag(pod(containers=beside)) == ("--container=trainer",)
    assert container_flag(pod(containers=[{"name": "another"}])) == ()


FIRST = "2026-05-01T12:00:00.100000000Z one\n"
SECOND = "2026-05-01T12:00:00.200000000Z two\n"
AWAY = complaint("Unable to connect to the server: dial tcp 10.0.0.1:443: i/o timeout")


def wait_for_readers(_seconds: float) -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("log-"):
            thread.join()


def test_whoever_follows_goes_on_where_the_api_server_broke_off(
    stub: StubKubectl, etude: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", wait_for_readers)
    over = run(condition("Complete", "True", "Finished"))
    running = shown({"items": [pod(container={"state": {"running": {}}})]})
    gone = shown({"items": [pod(container={"state": ended(0)})]})
    stub.teach("get rlruns.etude.dev", shown(run()), AWAY, AWAY, shown(run()), shown(over))
    stub.teach("get pods", running, running, gone)
    stub.teach("logs", Said(FIRST, "error: unexpected EOF", 1), Said(FIRST + SECOND))
    told = etude("logs", "demo", "--follow")
    assert told.code == 0
    assert told.out == "demo-trainer-0  one\ndemo-trainer-0  two\n"
    assert "demo-trainer-0  error: unexpected EOF" in told.err
    assert told.err.count("Unable to connect to the server") == 1
    first, second = stub.asked("logs")
    assert first.endswith("--follow --timestamps --container=trainer")
    assert second == f"{first} --since-time=2026-05-01T12:00:00.100000000Z"


def test_nobody_is_followed_of_whom_nobody_answers(
    stub: StubKubectl, etude: Callable[..., Any]
) -> None:
    stub.teach("get rlruns.etude.dev", AWAY)
    assert etude("logs", "demo", "--follow").code == 6

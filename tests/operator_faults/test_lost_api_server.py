"""API server and etcd killed under the operator, and the history of the store compacted."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.operator_faults.lab import Lab, laboratory
from tests.operator_faults.planes import installed
from tests.operator_faults.stories import References, told
from tests.operator_faults.workloads import CREATE, POOL, pool
from tests.support.kube import testbeds
from tests.support.kube.api_client import retry_until_answered

COMPACT = """
import json, sys, urllib.request
def ask(path, body):
    url = "http://127.0.0.1:2379/v3/kv/" + path
    data = json.dumps(body).encode()
    return json.load(urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=30))
found = ask("range", {"key": "AA=="})
ask("compaction", {"revision": found["header"]["revision"], "physical": True})
"""

Restart = Callable[[str], None]


@pytest.fixture(scope="module")
def own_plane() -> Iterator[Mapping[str, Any]]:
    """A control plane that may be killed."""
    for state in testbeds.cluster("apiserver"):
        installed(state)
        yield state


@pytest.fixture
async def own_lab(own_plane: Mapping[str, Any], tmp_path: Path) -> AsyncIterator[Lab]:
    async with laboratory(own_plane, tmp_path) as made:
        yield made


@pytest.fixture
def restart(own_plane: Mapping[str, Any]) -> Restart:
    """Kill a component of the control plane and start it again."""

    def again(component: str) -> None:
        done = testbeds.driver("restart", component, "--index", str(own_plane["index"]))
        assert done.returncode == 0, done.stderr

    return again


@pytest.mark.parametrize("component", ["kube-apiserver", "etcd"])
async def test_an_api_server_that_is_killed_in_the_middle_costs_nothing(
    own_lab: Lab, references: References, restart: Restart, component: str
) -> None:
    async with told(own_lab, CREATE, references) as story:
        acting = asyncio.create_task(CREATE.act(story.scene))
        await story.scene.until(lambda: story.scene.scenery.every("StatefulSet"))
        await asyncio.to_thread(restart, component)
        await acting
        await story.reaches_the_reference()


async def test_a_compacted_history_is_listed_again(
    own_lab: Lab, own_plane: Mapping[str, Any], restart: Restart
) -> None:
    async with own_lab.scene() as scene, own_lab.acting(scene) as operator:
        await scene.create(pool(1))
        await scene.until(lambda: _ready(scene.get("EnvPool", POOL)) == 1)
        # The operator knows no version after this one; the store forgets all before the last.
        for number in range(20):
            body = {"metadata": {"name": f"other-{number}"}}
            await own_lab.api.call("POST", "/api/v1/namespaces/default/configmaps", body)
        await asyncio.to_thread(_compact, own_plane)
        await asyncio.to_thread(restart, "kube-apiserver")
        await scene.api_calls(lambda: any(_is_gone(entry) for entry in operator.proxy.log))
        grown = {"spec": {"replicas": 3}}
        await retry_until_answered(lambda: scene.merge("EnvPool", POOL, grown, "scale"))
        await scene.until(lambda: _ready(scene.get("EnvPool", POOL)) == 3)
        assert scene.problems() == []


def _ready(found: Mapping[str, Any]) -> int:
    count: int = found.get("status", {}).get("readyReplicas", 0)
    return count


def _is_gone(entry: Any) -> bool:
    return entry.call.verb == "watch" and entry.outcome in {410, "ERROR"}


def _compact(state: Mapping[str, Any]) -> None:
    init = (Path(state["run"]) / "pid" / "init").read_text(encoding="utf-8").strip()
    enter = ("nsenter", "-t", init, "-n", "--", sys.executable, "-c", COMPACT)
    done = subprocess.run(enter, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

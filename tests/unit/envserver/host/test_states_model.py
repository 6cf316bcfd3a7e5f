"""Turns, snapshots, rollbacks, forks and restarts in any order, against a model of dictionaries."""

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Awaitable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from typing_extensions import override

from etude.common.errors import ReusedIdError, UnknownIdError, WrongStateError
from etude.envserver.drivers.in_memory import MemoryDriver
from etude.envserver.host.host import Host
from etude.envserver.host.leases.preemption import PreemptedError
from etude.envserver.host.workspace_sources import WorkspaceSources
from etude.v1 import environments_pb2

_T = TypeVar("_T")

PATHS = st.sampled_from(["a", "b", "folder/c"])
IDS = st.sampled_from(["s", "t"])
CALLS = st.integers(0, 7)
"""Few, so that calls are repeated before and after rollbacks."""
MAX_LEASES = 6


@dataclass(slots=True)
class Model:
    """What a lease should hold."""

    files: dict[str, str] = field(default_factory=dict)
    results: dict[str, tuple[str, str]] = field(default_factory=dict)
    """What each call wrote, by its id."""
    is_paused: bool = False
    is_preempted: bool = False


class NodeStates(RuleBasedStateMachine):
    """One node, which dies and comes back."""

    leases = Bundle("leases")

    @initialize(target=leases)
    def start(self) -> str:
        self.root = Path(tempfile.mkdtemp(prefix="etude-states-"))
        (self.root / "source").mkdir()
        (self.root / "source" / "first").write_text("first")
        self.loop = asyncio.new_event_loop()
        self.models: dict[str, Model] = {}
        self.snapshots: dict[str, tuple[str, Model]] = {}
        self.node = self._node()
        self._do(self.node.take_over())
        return self._opened("lease-0", "")

    @rule(lease=leases, number=CALLS, path=PATHS, content=st.sampled_from(["1", "2", "3"]))
    def write(self, lease: str, number: int, path: str, content: str) -> None:
        arguments = json.dumps({"path": path, "content": content})
        asked = environments_pb2.ToolCall(
            call_id=str(number), name="write_file", arguments_json=arguments
        )
        model, work = self.models[lease], self.node.find(lease).run_turn([asked])
        known = model.results.get(str(number))
        try:
            (result,) = self._do(work)
        except PreemptedError:
            assert model.is_preempted
        except WrongStateError:
            assert model.is_paused
        except ReusedIdError:
            assert known not in {None, (path, content)}
        else:
            assert not (model.is_paused)
            assert not (model.is_preempted)
            assert known in {None, (path, content)}
            assert not result.is_error
            if known is None:
                model.files[path] = content
                model.results[str(number)] = (path, content)

    @rule(lease=leases, name=IDS)
    def snapshot(self, lease: str, name: str) -> None:
        owner, model = self.snapshots.get(name, (lease, None))
        try:
            self._do(self.node.states.snapshot(self.node.find(lease), name, with_memory=False))
        except PreemptedError:
            assert self.models[lease].is_preempted
        except WrongStateError:
            assert self.models[lease].is_paused
        except ReusedIdError:
            assert owner != lease
        else:
            assert owner == lease
            if model is None:
                self.snapshots[name] = lease, deepcopy(self.models[lease])

    @rule(lease=leases, name=IDS)
    def rollback(self, lease: str, name: str) -> None:
        owner, model = self.snapshots.get(name, ("", None))
        try:
            self._do(self.node.states.rollback(self.node.find(lease), name))
        except PreemptedError:
            assert self.models[lease].is_preempted
        except WrongStateError:
            assert self.models[lease].is_paused
        except UnknownIdError:
            assert owner != lease
        else:
            assert owner == lease
            assert model is not None
            self.models[lease] = deepcopy(model)

    @rule(lease=leases, name=IDS, number=CALLS, again=st.booleans())
    def detour(self, lease: str, name: str, number: int, *, again: bool) -> None:
        """By chance alone these hardly ever come in this order."""
        self.snapshot(lease, name)
        self.write(lease, number, "a", "1")
        self.rollback(lease, name)
        if again:
            self.restart()
            self.write(lease, number, "a", "1")

    @rule(target=leases, parent=leases, name=IDS)
    def fork(self, parent: str, name: str) -> str:
        if len(self.models) >= MAX_LEASES or name not in self.snapshots:
            return parent
        lease = self._opened(f"lease-{len(self.models)}", name)
        self.models[lease] = Model(files=dict(self.snapshots[name][1].files))
        return lease

    @rule(lease=leases, name=IDS)
    def drop(self, lease: str, name: str) -> None:
        try:
            self._do(self.node.states.drop(self.node.find(lease), name))
        except UnknownIdError:
            assert self.snapshots.get(name, ("",))[0] != lease
        else:
            assert self.snapshots.pop(name)[0] == lease

    @rule(lease=leases)
    def pause(self, lease: str) -> None:
        try:
            self._do(self.node.states.pause(self.node.find(lease)))
        except PreemptedError:
            assert self.models[lease].is_preempted
        else:
            self.models[lease].is_paused = True

    @rule(lease=leases)
    def resume(self, lease: str) -> None:
        try:
            self._do(self.node.resume(lease, "control", ttl_s=600))
        except PreemptedError:
            assert self.models[lease].is_preempted
        else:
            self.models[lease].is_paused = False

    @rule(lease=leases)
    def preempt(self, lease: str) -> None:
        paused = self._do(self.node.preemptions.preempt([lease], 1))
        assert paused == ([] if self.models[lease].is_preempted else [lease])
        self.models[lease].is_preempted = True

    @rule(lease=leases)
    def let_go_on(self, lease: str) -> None:
        assert self._do(self.node.preemptions.resume([lease])) == [lease]
        self.models[lease].is_preempted = False

    @rule()
    def restart(self) -> None:
        self.node = self._node()
        held, removed = self._do(self.node.take_over())
        assert (held, removed) == (len(self.models), 0)

    @invariant()
    def every_lease_is_what_the_model_says(self) -> None:
        assert {each.snapshot_id for each in self.node.states.snapshots.held_snapshots()} == set(
            self.snapshots
        )
        for lease, model in self.models.items():
            environment = self.node.find(lease)
            assert environment.results.digests().keys() == model.results.keys()
            assert environment.record.held.preempted == model.is_preempted
            if not (model.is_paused or model.is_preempted):
                diff = self._do(environment.diff())
                found = {file.path: file.content.decode() for file in diff.written}
                assert found == model.files

    @override
    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self._do(self.node.close(list(self.models)))
            assert list(self.node.driver.leases.iterdir()) == []
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
            shutil.rmtree(self.root)

    def _node(self) -> Host:
        driver = MemoryDriver(self.root / "scratch" / "leases")
        sources = WorkspaceSources(self.root / "scratch")
        return Host(driver=driver, sources=sources, slots=MAX_LEASES, templates={"python"})

    def _opened(self, name: str, snapshot_id: str) -> str:
        lease = environments_pb2.Lease(
            lease_id=name,
            control_token="control",
            expires_unix_ms=round(1000 * (time.time() + 600)),
        )
        source = environments_pb2.WorkspaceSource(uri=(self.root / "source").as_uri())
        request = environments_pb2.OpenEnvironmentsRequest(
            leases=[environments_pb2.HeldLease(lease=lease, run_id="run")],
            template="python",
            workspace=source,
            toolset="Standard",
            snapshot_id=snapshot_id,
        )
        (outcome,) = self._do(self.node.open(request))
        assert outcome.HasField("lease"), outcome
        self.models[name] = Model()
        return name

    def _do(self, work: Awaitable[_T]) -> _T:
        return self.loop.run_until_complete(work)


TestNodeStates = NodeStates.TestCase
TestNodeStates.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)

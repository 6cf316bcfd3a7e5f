"""The protocol under every order of single store calls, and every failure, that hypothesis finds.

Two publishers, three readers, a keeper and two collectors run as threads that stop before each
store call. The machine chooses who goes on, and whether the call takes effect, fails, or both. A
publisher that sleeps while another takes over is nothing special here, and neither is one that
dies in the middle.
"""

import functools
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)
from typing_extensions import override

from etude.common import weights
from etude.common.weights import VersionId

play = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("machine_world.py"))))
Actor = Any
"""A play.Actor."""
Job = Callable[[Actor], None]

PUBLISHERS, READERS, COLLECTORS = ("a", "b"), ("r0", "r1", "r2"), ("c0", "c1")
EVERYBODY = (*PUBLISHERS, *READERS, *COLLECTORS, "keeper")
FATES = [
    *["ok"] * 12,
    "fails before",
    "fails after",
    "fails half-way",
    "killed before",
    "killed after",
    "killed half-way",
]


class Protocol(RuleBasedStateMachine):
    """Whoever is busy takes a step; whoever is idle may begin something."""

    manifest_first = False
    resumable: Callable[[], list[VersionId]] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.world = play.World()
        self.actors = {name: play.Actor(self.world, name) for name in EVERYBODY}
        self.actors["a"].whole(functools.partial(play.open_line, back=1))
        for value in range(4):
            self.actors["a"].whole(
                functools.partial(play.publish, place=0, value=value, saves=True)
            )
            self.actors[READERS[value % 2]].whole(play.follow)

    def job(self, name: str, data: st.DataObject) -> Job:
        """What an actor does next."""
        if name in READERS:
            followed: Job = play.follow
            return followed
        if name == "keeper":
            picks = data.draw(st.sampled_from([(0, 0), (1, 1), (0, 2), (1, 3), (0, 1)]))
            return functools.partial(play.keep, picks=picks)
        if name in COLLECTORS:
            return functools.partial(play.collect, resumable=type(self).resumable)
        own = self.actors[name].memory
        if "base" not in own or data.draw(st.integers(0, 4)) == 0:
            return functools.partial(play.open_line, back=data.draw(st.integers(1, 4)))
        return functools.partial(
            play.publish,
            place=data.draw(st.integers(0, 3)),
            value=data.draw(st.integers(0, 2)),
            saves=data.draw(st.booleans()),
            manifest_first=self.manifest_first,
        )

    @rule(name=st.sampled_from(EVERYBODY), data=st.data())
    def begin(self, name: str, data: st.DataObject) -> None:
        if not self.actors[name].busy:
            self.actors[name].begin(self.job(name, data))

    @rule(names=st.lists(st.sampled_from(EVERYBODY), min_size=1, max_size=6), data=st.data())
    def act_at_once(self, names: list[str], data: st.DataObject) -> None:
        for name in names:
            if not self.actors[name].busy:
                self.actors[name].whole(self.job(name, data))

    @rule(
        name=st.sampled_from(EVERYBODY),
        calls=st.integers(0, 60),
        meanwhile=st.lists(st.sampled_from(EVERYBODY), min_size=1, max_size=5),
        data=st.data(),
    )
    def sleep(self, name: str, calls: int, meanwhile: list[str], data: st.DataObject) -> None:
        """Somebody stops in the middle while others act, and then goes on."""
        self.begin(name, data)
        self.go_on_with(name, calls, "ok")
        self.act_at_once(meanwhile, data)
        self.actors[name].finish()

    def go_on_with(self, name: str, calls: int, fate: str) -> None:
        actor = self.actors[name]
        for left in reversed(range(calls)):
            if actor.busy:
                actor.step("ok" if left else fate)

    @precondition(lambda self: any(actor.busy for actor in self.actors.values()))
    @rule(data=st.data(), calls=st.integers(1, 12), fate=st.sampled_from(FATES))
    def go_on(self, data: st.DataObject, calls: int, fate: str) -> None:
        busy = [name for name, actor in self.actors.items() if actor.busy]
        self.go_on_with(data.draw(st.sampled_from(busy)), calls, fate)

    @precondition(lambda self: any(actor.busy for actor in self.actors.values()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        busy = [name for name, actor in self.actors.items() if actor.busy]
        self.actors[data.draw(st.sampled_from(busy))].finish()

    @override
    def teardown(self) -> None:
        for actor in self.actors.values():
            while actor.busy and actor.error is None:
                actor.step("killed before")


TestProtocol = Protocol.TestCase
# The same orders each time: a search that finds something new by chance belongs to a long run.
TestProtocol.settings = settings(
    max_examples=30,
    stateful_step_count=30,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def of(module: str) -> Any:
    return sys.modules[f"etude.common.weights.protocol.{module}"]


def _builds_on_the_nearest(self: Any) -> VersionId | None:
    if self.live is None:
        return None
    before = [v for v in self.chain[:-1] if v.number <= self.live.number]
    return before[-1] if before else None


MUTATIONS: dict[str, list[tuple[str, str, Any]]] = {
    "the reader does not look at the epochs": [
        ("", "is_accepted", lambda store, version: store.head(version.manifest_key) is not None)
    ],
    "the reader builds on what is not live": [
        ("plan._Planner", "_start", _builds_on_the_nearest),
    ],
    "payloads are not looked for before the manifest": [
        ("publication", "check_stored", lambda *_: None)
    ],
    "the collector does not know the checkpoints": [],
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_without_one_of_its_checks_the_protocol_breaks(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for path, attribute, other in MUTATIONS[name]:
        module, _, member = path.partition(".")
        where = of(module) if module else weights
        monkeypatch.setattr(getattr(where, member) if member else where, attribute, other)

    class Broken(Protocol):
        """The same machine; what publishes first, or is retained, may differ."""

        manifest_first = "payloads" in name
        resumable = list if "checkpoints" in name else None

    thorough = settings(
        max_examples=200,
        stateful_step_count=30,
        derandomize=True,
        phases=[Phase.generate],
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, Flaky)):
        run_state_machine_as_test(Broken, settings=thorough)

"""Kill points: roles of a real run, and the moments at which a process of one is killed."""

import random
import time
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from typing_extensions import override

from chaos_bench.local_run import LocalRun, RunProcess

POLL_S = 0.002
"""A version of a small model is uploaded within some milliseconds."""
SANDBOX_S = 10.0
"""Longest wait for a call."""


class Role(Enum):
    """Processes that are killed."""

    CONTROLLER = "controller"
    LEARNER = "learner"
    WORKER = "rollout worker"
    ENGINE = "engine"
    BROKER = "broker"
    HOST = "sandbox host"
    SANDBOX = "sandbox"
    REWARDS = "rewards"
    MACHINE = "machine"
    """All processes at once."""


class Moment(Enum):
    """Moments at which a process is killed."""

    ANY = "any"
    CHECKPOINT = "mid-checkpoint"
    PUBLISH = "mid-publish"
    TURN = "mid-turn"


class KillPoint(NamedTuple):
    """One way to kill."""

    role: Role
    moment: Moment

    @override
    def __str__(self) -> str:
        return f"{self.role.value}, {self.moment.value}"


POINTS = (
    *(KillPoint(Role.CONTROLLER, moment) for moment in Moment),
    *(KillPoint(Role.LEARNER, moment) for moment in Moment),
    *(KillPoint(Role.WORKER, moment) for moment in (Moment.ANY, Moment.TURN)),
    *(KillPoint(Role.ENGINE, moment) for moment in (Moment.TURN, Moment.PUBLISH)),
    KillPoint(Role.BROKER, Moment.ANY),
    KillPoint(Role.HOST, Moment.TURN),
    KillPoint(Role.SANDBOX, Moment.TURN),
    KillPoint(Role.REWARDS, Moment.ANY),
    *(KillPoint(Role.MACHINE, moment) for moment in (Moment.ANY, Moment.CHECKPOINT)),
)

PODS = {
    Role.CONTROLLER: "trainer",
    Role.ENGINE: "inference",
    Role.BROKER: "broker",
    Role.HOST: "node",
    Role.REWARDS: "rewards",
}
ACTORS = {Role.LEARNER: "ray::LearnerRank", Role.WORKER: "ray::RolloutWorker"}


def draw_points(seed: int, *, done: int) -> Iterator[KillPoint]:
    """Points in rounds of all of them, each round in an order of its own, after those done."""
    number, left = done // len(POINTS), done % len(POINTS)
    while True:
        points = list(POINTS)
        random.Random(f"{seed}/{number}").shuffle(points)  # noqa: S311 - a simulation
        yield from points[left:]
        number, left = number + 1, 0


def find_process(run: LocalRun, role: Role, draw: random.Random) -> RunProcess | None:
    """Find a process of a role; None if there is none now."""
    if role in PODS:
        return run.pod(PODS[role])
    if role is Role.SANDBOX:
        return _find_sandbox(run)
    found = [each for each in run.processes() if each.title.startswith(ACTORS[role])]
    return draw.choice(found) if found else None


def _find_sandbox(run: LocalRun) -> RunProcess | None:
    """Find a process of a sandbox, which lives as long as a call."""
    until_s = time.monotonic() + SANDBOX_S
    while time.monotonic() < until_s:
        if (found := run.sandbox_process()) is not None:
            return found
    return None


def wait_for_moment(run: LocalRun, moment: Moment, *, limit_s: float) -> bool:
    """Wait for a moment; False if it did not come in time."""
    if moment is Moment.ANY:
        return True
    list_files = {
        Moment.CHECKPOINT: _unfinished_checkpoints,
        Moment.PUBLISH: _unpublished_versions,
        Moment.TURN: _trajectories,
    }[moment]
    return _wait_for_new(lambda: list_files(run.folder), limit_s)


def _wait_for_new(list_files: Callable[[], set[str]], limit_s: float) -> bool:
    known, until_s = list_files(), time.monotonic() + limit_s
    while time.monotonic() < until_s:
        if list_files() - known:
            return True
        time.sleep(POLL_S)
    return False


def _unfinished_checkpoints(folder: Path) -> set[str]:
    """Attempts at checkpoints that have no manifest yet."""
    return {
        str(attempt)
        for place in (folder / "checkpoints").glob("*")
        if not (place / "manifest.json").exists()
        for attempt in place.glob("*/*")
    }


def _unpublished_versions(folder: Path) -> set[str]:
    """Uploaded versions without a manifest."""
    weights = folder / "weights"
    return {
        str(version)
        for version in (weights / "deltas").glob("*/*")
        if not (weights / "manifests" / version.parent.name / f"{version.name}.json").exists()
    }


def _trajectories(folder: Path) -> set[str]:
    """Segments of recorded turns: another turn has begun when one appears."""
    return {str(each) for each in (folder / "trajectories").rglob("*.wal")}

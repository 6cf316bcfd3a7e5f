"""Engines: activation of versions on all replicas, and the rotation of those that serve them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

from etude.common.api.run.weights import Weights
from etude.common.errors import UnavailableError
from etude.common.weights import MAX_LAG, VersionId
from etude.trainer.controller.publishing.engine_client import (
    ContentRefusedError,
    EngineWeightClient,
)
from etude.trainer.controller.publishing.lent_engines import LentEngines
from etude.trainer.rollouts.protocol import RolloutWorkers
from etude.trainer.routing.table import EngineState, RoutingTable
from etude.v1 import weights_pb2

log = logging.getLogger(__name__)

GRACE_S = 15.0
"""Time that slower replicas have after the first one serves, before they leave rotation."""

LAGGING = "ReplicaLagging"

_Task = asyncio.Task[weights_pb2.WeightStatus]
_Move = Callable[[EngineWeightClient], Awaitable[weights_pb2.WeightStatus]]


class EnginesLateError(UnavailableError):
    """No engine served a version within the run's limit."""

    reason = "EnginesNotServing"


class VersionRefusedError(UnavailableError):
    """More than half of the engines refused a version's content: it must not be served."""

    reason = "VersionRefused"


@dataclass(slots=True)
class Engines:
    """Weight clients of all replicas."""

    targets: Sequence[str]
    timeout_s: float
    """Longest wait for the first replica that serves a version."""
    grace_s: float = GRACE_S
    together_s: float | None = None
    """Longest wait for all replicas to stage a version, before those that did activate it together;
    None lets each activate it as soon as it is ready."""
    num_for_evaluation: int = 0
    """Number of targets, the first, that serve evaluations alone."""
    limit: int = 0
    """Number of targets to use, from the next version on; 0 for all."""
    rotation: tuple[str, ...] = ()
    """Replicas that serve the newest activated version."""
    lent: LentEngines = field(default_factory=LentEngines)
    """Engines of routes, beside the run's own."""
    token_slots: int = 0
    """Completions that rollouts may have open at a time; 0 for no limit."""
    last_pause_s: float = 0.0
    """Longest engine pause of the newest activation."""
    _replicas: dict[str, EngineWeightClient] = field(init=False)
    _live: dict[str, VersionId] = field(default_factory=dict)
    """The version that each replica was last known to serve."""
    _newest: VersionId | None = None
    _moves: set[_Task] = field(default_factory=set)
    """Calls under way; those to late replicas continue in the background."""
    _hints: set[asyncio.Task[None]] = field(default_factory=set)
    _table: RoutingTable = field(default_factory=RoutingTable)

    def __post_init__(self) -> None:
        self._replicas = {
            target: EngineWeightClient(target, self.timeout_s) for target in self.targets
        }

    @classmethod
    def of(cls, targets: Sequence[str], weights: Weights) -> "Engines":
        """Create the engines of a run from its settings."""
        advanced = weights.advanced
        together_s = advanced.commit_timeout_seconds if advanced.commit == "Together" else None
        return cls(targets, timeout_s=weights.timeout_seconds, together_s=together_s)

    @property
    def expected(self) -> Sequence[str]:
        """Replicas to use; others may be starting or terminating."""
        return self.targets[: self.limit] if self.limit else self.targets

    @property
    def num_addressed(self) -> int:
        """Number of targets that may be called; a removed one stays until it leaves rotation."""
        if not self.limit:
            return 0
        last = max((self.targets.index(target) + 1 for target in self.rotation), default=0)
        return max(self.limit, last)

    def routing_table(self) -> RoutingTable:
        """The engines as rollout workers must see them now; a change has a higher revision."""
        engines = tuple(
            (target, self._state_of(target))
            for target in self.targets
            if target in self.rotation or target in self.expected
        )
        engines += tuple(self.lent.entries(self._newest))
        known = self._table.engines, self._table.token_slots
        if (engines, self.token_slots) != known:
            self._table = RoutingTable(
                revision=self._table.revision + 1,
                engines=engines,
                evaluation=frozenset(self.targets[: self.num_for_evaluation]),
                token_slots=self.token_slots,
            )
        return self._table

    def _state_of(self, target: str) -> EngineState:
        if target not in self.expected:
            return EngineState.DRAINING
        return EngineState.LIVE if target in self.rotation else EngineState.LAGGING

    @property
    def num_lent(self) -> int:
        """Engines of routes that sample for the run now."""
        return self.lent.num_live(self._newest)

    @property
    def lag_problem(self) -> str:
        """Describe the replicas that lag far behind; empty while none does."""
        newest = self._newest
        if newest is None:
            return ""
        behind = [
            f"{target} serves {live}"
            for target, live in sorted(self._live.items())
            if target in self.expected and newest.number - live.number > MAX_LAG
        ]
        return f"{', '.join(behind)}; the newest version is {newest}" if behind else ""

    def announce(self, version: VersionId) -> None:
        """Announce a version to replicas that update themselves, in the background."""
        if self.together_s is not None:
            return
        for target in self.expected:
            replica = self._replicas[target]
            hint = asyncio.create_task(replica.announce(version), name=f"announce-{target}")
            self._hints.add(hint)
            hint.add_done_callback(self._hints.discard)

    async def activate(self, version: VersionId) -> None:
        """Activate the version on every replica; those that lag leave rotation until they serve it.

        Raises:
            VersionRefusedError: most replicas refused its content.
            EnginesLateError: none served it in time.
            UnavailableError: none can.
        """
        if not self.expected:
            return
        self._newest = version
        self._stop_moves()
        waited_for = await self._find_reachable()
        try:
            if self.together_s is None:
                tasks = self._start("commit", waited_for, lambda replica: replica.activate(version))
                await self._finish(tasks, version, under_way={})
                return
            staging = self._start("stage", waited_for, lambda replica: replica.stage(version))
            prepared = await self._collect_succeeded(staging, version, grace_s=None)
            tasks = self._start(
                "commit", prepared, lambda replica: _activate_pinned(replica, version)
            )
            await self._finish(tasks, version, under_way=staging)
        except BaseException:
            self._stop_moves()
            raise

    async def roll_back(self, version: VersionId) -> None:
        """Roll every reachable replica back to a version."""
        self._stop_moves()
        waited_for = await self._find_reachable()
        tasks = self._start("roll-back", waited_for, lambda replica: replica.roll_back(version))
        if tasks:
            await asyncio.wait(tasks.values(), timeout=self.timeout_s)
        for target, task in tasks.items():
            if not task.done():
                task.cancel()
            elif (error := task.exception()) is not None:
                log.warning("engine %s did not roll back: %s", target, error)
            else:
                self._note_status(target, task.result())

    async def _find_reachable(self) -> list[str]:
        """Replicas to wait for; those out of rotation must answer first."""
        if not self.rotation:
            return list(self.expected)
        away = [target for target in self.expected if target not in self.rotation]
        statuses = await asyncio.gather(*(self._replicas[target].status() for target in away))
        for target, status in zip(away, statuses, strict=True):
            if status is not None:
                self._note_status(target, status)
        silent = {target for target, status in zip(away, statuses, strict=True) if status is None}
        return [target for target in self.expected if target not in silent]

    def _note_status(self, target: str, status: weights_pb2.WeightStatus) -> None:
        if status.HasField("live"):
            self._live[target] = VersionId.from_proto(status.live)
        if status.HasField("suspect_since"):
            log.error("engine %s distrusts its memory: %s", target, status.message)

    def _start(self, what: str, targets: Collection[str], move: _Move) -> dict[str, _Task]:
        async def run_move(replica: EngineWeightClient) -> weights_pb2.WeightStatus:
            return await move(replica)

        tasks = {
            target: asyncio.create_task(run_move(self._replicas[target]), name=f"{what}-{target}")
            for target in self.expected
            if target in targets
        }
        self._moves.update(tasks.values())
        return tasks

    async def _finish(
        self, tasks: dict[str, _Task], version: VersionId, *, under_way: dict[str, _Task]
    ) -> None:
        """Wait for activations, and rotate to the replicas that serve; the others catch up."""
        serving = await self._collect_succeeded(tasks, version, grace_s=self.grace_s)
        for target in serving:
            self._note_status(target, tasks[target].result())
        self.rotation = tuple(target for target in self.expected if target in serving)
        self.last_pause_s = max(tasks[target].result().last_pause_seconds for target in serving)
        for target in self.expected:
            if target not in serving:
                self._catch_up_later(target, version, tasks.get(target) or under_way.get(target))

    async def _collect_succeeded(
        self, tasks: dict[str, _Task], version: VersionId, *, grace_s: float | None
    ) -> list[str]:
        """Collect the targets that succeeded in time, at least one.

        Raises:
            VersionRefusedError: most replicas refused the content.
            EnginesLateError: none did.
            UnavailableError: none can.
        """
        await self._wait(tasks.values(), grace_s)
        done = {target: task for target, task in tasks.items() if task.done()}
        errors = {t: error for t, task in done.items() if (error := task.exception()) is not None}
        refused = [e for e in errors.values() if isinstance(e, ContentRefusedError)]
        if 2 * len(refused) > len(self.expected):
            raise VersionRefusedError(f"version {version}: {refused[0]}")
        if len(done) == len(errors):
            raise next(iter(errors.values()), None) or EnginesLateError(
                f"no engine of {', '.join(self.expected)} served version {version}"
                f" within {self.timeout_s:.0f} s: see the logs of the inference role"
            )
        for target, error in errors.items():
            log.warning("engine %s leaves rotation: %s", target, error)
        return [target for target in done if target not in errors]

    async def _wait(self, tasks: Collection[_Task], grace_s: float | None) -> None:
        """Wait until all are done, or time is up.

        The first success starts the others' grace period. Without a grace period all have as long
        as replicas that activate together, and longer only if none is done by then.
        """
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        end_s, pending, is_first = began_s + self.timeout_s, set(tasks), True
        while pending:
            done, pending = await asyncio.wait(
                pending,
                timeout=max(0.0, end_s - now_s()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                return
            if is_first and any(task.exception() is None for task in done):
                is_first = False
                together_s = began_s + (self.together_s or 0.0)
                last_s = together_s if grace_s is None else now_s() + grace_s
                end_s = min(end_s, last_s)

    def _catch_up_later(self, target: str, version: VersionId, task: _Task | None) -> None:
        """Let a late replica continue, and return to rotation once it serves the version."""
        if task is not None:
            if task.done():
                return  # it refused or failed: the next version is its next attempt
            log.warning("engine %s lags behind %s and leaves rotation", target, version)

        async def catch_up() -> weights_pb2.WeightStatus:
            if task is not None:
                await task
            replica = self._replicas[target]
            is_held = self.together_s is not None
            move = _activate_pinned(replica, version) if is_held else replica.activate(version)
            status = await move
            self._note_status(target, status)
            if self._newest == version:
                serving = {*self.rotation, target}
                self.rotation = tuple(each for each in self.expected if each in serving)
            return status

        chase = asyncio.create_task(catch_up(), name=f"catch-up-{target}")
        chase.add_done_callback(_log_error)
        self._moves.add(chase)

    def _stop_moves(self) -> None:
        for task in self._moves:
            task.add_done_callback(_log_error)
            task.cancel()
        self._moves.clear()

    async def close(self) -> None:
        self._stop_moves()
        await self.lent.close()
        for replica in self._replicas.values():
            await replica.close()


async def _activate_pinned(
    replica: EngineWeightClient, version: VersionId
) -> weights_pb2.WeightStatus:
    """Activate a version on a replica, and pin it there."""
    status = await replica.activate(version)
    await replica.pin(version)
    return status


def _log_error(task: _Task) -> None:
    """Log the error of a task that is no longer awaited."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("%s: %s", task.get_name(), error)


PERIOD_S = 0.5
"""Age that a worker's table may reach. Loads of other workers may be twice as old: they are
collected in one round and spread in the next."""


@dataclass(slots=True)
class RoutingBroadcast:
    """Sends the routing table to all workers: every change, and loads if there are several."""

    engines: Engines
    workers: RolloutWorkers
    period_s: float = PERIOD_S
    _sent: RoutingTable = field(default_factory=RoutingTable)

    async def run(self) -> None:
        """Send tables until cancelled."""
        while True:
            await self.send()
            await asyncio.sleep(self.period_s)

    async def send(self) -> None:
        """Send the table, if a worker can learn anything from it."""
        table = self.engines.routing_table()
        if table != self._sent or self.workers.num_workers > 1:
            await self.workers.update_routing(table)
            self._sent = table

"""Checks that can be broken on purpose, one at a time: each must make the run fail."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override

from etude.common.weights.protocol.garbage_collector import GarbageCollector
from etude.common.weights.replicas import block_reader, staged_file
from etude.inference.swap.coordinator import SwapCoordinator
from etude.inference.updates.updater import Updater
from etude.inference.worker.rank import Rank

SLOW_S = 0.05
"""What a slow machine may need between two steps, so that few versions show a fault."""


class _Whatever(str):
    """Equal to every other text."""

    __slots__ = ()
    __hash__ = str.__hash__

    @override
    def __eq__(self, other: object) -> bool:
        return True

    @override
    def __ne__(self, other: object) -> bool:
        return False


def _skip_epochs() -> None:
    async def believes(_self: Updater, _version: object) -> None:
        """Does not ask for newer epochs."""

    broken: Any = Updater
    broken._check_accepted = believes


def _skip_base() -> None:
    def nearest(planner: Any) -> Any:
        """Takes what is live for the version before it on the chain."""
        if planner.live is None:
            return None
        before = [each for each in planner.chain[:-1] if each.number <= planner.live.number]
        return before[-1] if before else None

    _change_prepare(lambda swap, target, base: (target, _with_state(base, swap._state.hex())))
    # The package's attribute of this name is the function.
    sys.modules["etude.common.weights.protocol.plan"]._Planner._start = nearest


def _skip_prediction() -> None:
    _change_prepare(
        lambda _swap, target, base: (_with_state(target, _Whatever(target.state)), base)
    )


def _change_prepare(change: Callable[[SwapCoordinator, Any, Any], tuple[Any, Any]]) -> None:
    prepare = SwapCoordinator.prepare

    async def other(
        self: SwapCoordinator, path: Any, target: Any, *, base: Any, keep_old: bool = True
    ) -> int:
        told, base = change(self, target, base)
        size = await prepare(self, path, told, base=base, keep_old=keep_old)
        if self._pending is not None:
            self._pending = self._pending._replace(target=target)
        return size

    broken: Any = SwapCoordinator
    broken.prepare = other


def _with_state(ref: Any, state: str) -> Any:
    return None if ref is None else ref.model_copy(update={"state": state})


def _apply_twice() -> None:
    prepare, once = Rank.prepare, Rank.activate
    paths: dict[int, str] = {}

    def remember(self: Rank, path: str, *args: Any) -> None:
        paths[id(self)] = path
        prepare(self, path, *args)

    def activate(self: Rank) -> bool:
        done, live = once(self), self._mapped_live()
        return done and live.write(live.prepare(staged_file.read_staged(Path(paths[id(self)]))))

    broken: Any = Rank
    broken.prepare, broken.activate = remember, activate


def _label_first() -> None:
    commit = SwapCoordinator._activate

    async def early(self: SwapCoordinator, prepared: Any) -> float:
        await self.gate.relabel(prepared.target.version, drop_cache=False)
        time.sleep(SLOW_S)  # noqa: ASYNC251 - the engine's own thread goes on
        return await commit(self, prepared)

    SwapCoordinator._activate = early  # type: ignore[method-assign]


def _skip_tombstone() -> None:
    def hasty(self: GarbageCollector) -> list[str]:
        doomed = self._observe().deletable
        time.sleep(40 * SLOW_S if doomed else 0)
        self.store.delete(doomed)
        return doomed

    GarbageCollector.collect = hasty  # type: ignore[method-assign]


def _skip_blake3() -> None:
    block_reader._is_intact = lambda *_: True


class Mutation(NamedTuple):
    """A broken check, and the faults that it lets through; others come by chance anyway."""

    apply: Callable[[], None]
    provoked_by: frozenset[str] = frozenset()
    versions: int = 40
    """That a run needs to show it."""


MUTATIONS = {
    "skip the epoch check": Mutation(_skip_epochs, frozenset({"overtaken reader"}), 25),
    "skip the base check": Mutation(_skip_base, frozenset({"overtaken reader", "flip at rest"})),
    "apply twice": Mutation(_apply_twice, versions=12),
    "label before write": Mutation(_label_first, versions=12),
    "collect without tombstone": Mutation(_skip_tombstone, frozenset({"late joiner"})),
    "skip BLAKE3": Mutation(_skip_blake3, versions=80),
    "skip the predicted digest": Mutation(
        _skip_prediction, frozenset({"wrong delta"}), versions=25
    ),
}


def apply(name: str) -> None:
    """Break one check in this process; none if the name is empty."""
    if name:
        MUTATIONS[name].apply()

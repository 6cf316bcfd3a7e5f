"""Two-phase swaps over the ranks of one forward pass: all of them, or none."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from etude.common.errors import CorruptError, UnavailableError, crossing
from etude.common.weights.protocol.manifest import VersionRef
from etude.common.weights.replicas.regions import Regions
from etude.common.weights.tensors.digest import NOTHING, Digest
from etude.common.weights.tensors.schema import Schema
from etude.inference import ranks, steps
from etude.inference.olders import Olders
from etude.inference.pace import Pace
from etude.inference.ranks import Prepared, RankError, Ranks
from etude.inference.steps import HangsError, Steps

_T = TypeVar("_T")


class _Next(NamedTuple):
    """What is prepared on all ranks, and for which version."""

    target: VersionRef
    found: Prepared


@dataclass(slots=True)
class Swap:
    """The coordinator: every step is checked against the state digest."""

    ranks: Ranks
    steps: Steps
    may_load: bool = True
    """Whether ranks may load a changed tensor where it cannot be written in place."""
    live: VersionRef | None = None
    """What is served; None before the first version."""
    max_undo: int = 1
    """Versions whose old words ranks keep, at most."""
    drain_s: float = 600.0
    """Longest wait for running requests, where the pause mode has them end first."""
    failed: str = ""
    """Why nothing can be promised of the live words any more; empty while all is well."""
    schema_sha256: str = ""
    """Of the schema that the ranks are mapped to."""
    undone: int = 0
    """Swaps that failed half-way and were undone."""
    regions: Regions = field(default_factory=dict)
    """Which parts of the tensors the ranks hold, together."""
    olders: Olders = field(default_factory=Olders)
    """What can be gone back to."""
    _pace: Pace = field(default_factory=Pace)
    _state: Digest = NOTHING
    _next: _Next | None = None
    _doubt: str = ""
    """What will have failed if the swap that is running does not end well."""

    @property
    def state(self) -> str:
        """Digest of all live words, as the changes add up to it."""
        return self._state.hex()

    async def bake(self, schema: Schema) -> None:
        """Map a schema to the ranks; only before the first version.

        Raises:
            CorruptError: it does not describe the model.
            ComputedError: no map reaches all of the model, and nothing may be loaded.
            UnavailableError: something is being served, which the map would destroy.
        """
        if self.live is not None:
            self.failed = "the tensors of the policy changed; a restart maps the new ones"
            raise UnavailableError(f"engine: {self.failed}")
        began = time.perf_counter()
        baked = await ranks.bake(self.ranks, schema, may_load=self.may_load)
        self.regions, self._state = baked.regions, baked.state
        self._pace = Pace(bake_s=time.perf_counter() - began, loads=baked.loads)
        self.schema_sha256 = schema.sha256

    async def prepare(
        self, staged: Path, target: VersionRef, *, base: VersionRef | None, keep_old: bool = True
    ) -> int:
        """Gather on all ranks what a staged version changes, while requests run.

        Args:
            staged: blocks on local disk, every byte verified.
            target: what is live after the commit.
            base: what the blocks build on; None for complete ones.
            keep_old: whether it can be undone, for the price of keeping all old words.

        Returns:
            Memory that the ranks hold for it, in bytes.

        Raises:
            CorruptError: it would not lead to the target's state; nothing was written.
            RankError: a rank has no memory for it, or fails.
            UnavailableError: the engine cannot go on, or a rank hangs, as `failed` says.
        """
        self._next, began = None, time.perf_counter()
        if base is not None and base.state != self._state.hex():
            raise CorruptError(
                f"version {target.version} builds on state {base.state} of {base.version}, "
                f"the live state is {self._state.hex()}"
            )
        depth = self.olders.depth
        kept = min(depth, self.max_undo - 1) if keep_old else 0
        with crossing(UnavailableError, f"version {target.version} is staged no more"):
            num_bytes = (await asyncio.to_thread(staged.stat)).st_size
        limit_s = self._pace.prepare_limit_s(num_bytes)
        asked = self._asked("prepare", str(staged), keep_old, depth, kept)
        await self._beside(limit_s, asked, f"preparing version {target.version}")
        self.olders.keep(kept)
        work = ranks.prepared(self.ranks)
        found = await self._beside(limit_s, work, f"preparing version {target.version}")
        self._pace.prepared(time.perf_counter() - began)
        predicted = self._state.plus(found.change).hex()
        if predicted != target.state:
            raise CorruptError(
                f"version {target.version} would lead to state {predicted}, "
                f"its manifest says {target.state}"
            )
        self._next = _Next(target, found)
        return found.num_bytes

    async def commit(self) -> float:
        """Write what was prepared on all ranks, or on none.

        Returns:
            How long requests were frozen, in seconds.

        Raises:
            RankError: a rank failed; the old version serves, or `failed` says that none can.
            UnavailableError: running requests did not end; or something hangs, as `failed` says.
            RuntimeError: nothing is prepared.
        """
        if self._next is None:
            raise RuntimeError("commit() needs a prepare() that succeeded")
        prepared, self._next = self._next, None
        return await self._whole(self._commit(prepared))

    async def _commit(self, prepared: _Next) -> float:
        target, found = prepared
        async with self._frozen() as began:
            # Not `failed` yet: requests that come meanwhile are not to be refused, but to wait.
            self._doubt = f"the swap to {target.version} failed half-way and could not be undone"
            if not found.is_undoable:
                self._doubt += ": it was too large to keep the old words beside the live ones"
            await self._write(target)
            # What was cached under a version that was left on purpose must not be read again.
            is_back = self.live is not None and target.number < self.live.number
            await self._name(target, drop_cache=is_back)
            self._state = self._state.plus(found.change)
            if not found.is_undoable:
                self.olders.keep(0)
            elif self.live is not None:
                self.olders.push(self.live, found.num_bytes)
            self.live = target
            self._doubt = ""
        return time.perf_counter() - began

    async def _write(self, target: VersionRef) -> None:
        what, limit_s = f"writing version {target.version}", self._pace.write_limit_s
        try:
            done = await steps.within(limit_s, self._asked("commit"), what)
        except HangsError:
            raise  # a rank that still writes cannot be told to undo
        except Exception as error:
            await self._take_back(target)
            raise RankError(f"{what} failed: {error!r}") from error
        if not all(done):
            await self._take_back(target)
            raise RankError(
                f"rank {list(done).index(False)} held other words than version "
                f"{target.version} was prepared from"
            )

    async def _take_back(self, target: VersionRef) -> None:
        """Undo on all ranks, and prove it; requests stay frozen for ever if that fails."""
        what, limit_s = f"undoing version {target.version}", self._pace.undo_limit_s
        undo = self._asked("undo", self.olders.depth + 1)
        undone = await steps.within(limit_s, undo, what)
        state = await steps.within(limit_s, ranks.scan(self.ranks), what)
        if self.live is None:
            # Nothing was served, and nothing is: the words may be anything.
            self._state, self._doubt = state, ""
        elif all(undone) and state == self._state:
            self.undone += 1
            self._doubt = ""

    async def revert(self, target: VersionRef | None = None) -> float:
        """Go back to an older version whose words are still held.

        Args:
            target: its name, or a new one for the same words; the version before, if not given.

        Returns:
            How long requests were frozen, in seconds.

        Raises:
            UnavailableError: the words are not what they must be.
            RuntimeError: they are not held.
        """
        older = target or self.olders.newest
        if older is None or not self.olders.can_restore(older.state):
            raise RuntimeError("there is nothing to go back to")
        return await self._whole(self._revert(older))

    async def _revert(self, older: VersionRef) -> float:
        async with self._frozen() as began:
            self._doubt = f"going back to {older.version} failed half-way"
            restored = ""
            what, limit_s = f"going back to {older.version}", self._pace.undo_limit_s
            while restored != older.state:
                undo = self._asked("undo", self.olders.depth)
                if not all(await steps.within(limit_s, undo, what)):
                    raise UnavailableError(f"engine: {self._doubt}")
                restored = self.olders.pop().state
            await self._name(older, drop_cache=True)
            self._state, self.live = Digest.parse(older.state), older
            self._doubt = ""
        return time.perf_counter() - began

    async def relabel(self, target: VersionRef) -> float:
        """Serve the same words under another name.

        Returns:
            How long requests were frozen, in seconds.

        Raises:
            ValueError: the target's state is another one.
        """
        if target.state != self._state.hex():
            raise ValueError(f"version {target.version} has other weights than the live ones")
        return await self._whole(self._relabel(target))

    async def _relabel(self, target: VersionRef) -> float:
        async with self._frozen() as began:
            self._doubt = f"naming version {target.version} failed"
            await self._name(target, drop_cache=False)
            self.live, self._doubt = target, ""
        return time.perf_counter() - began

    async def audit(self) -> bool:
        """Whether the live words still are what was promised, while requests run.

        Returns:
            False if memory was damaged; `failed` then says so.

        Raises:
            UnavailableError: a rank hangs, as `failed` says.
        """
        work = ranks.scan_beside(self.ranks)
        found = await self._beside(self._pace.scan_limit_s, work, "a scan of the live words")
        if found == self._state:
            return True
        self.failed = f"the live words have state {found.hex()}, not {self._state.hex()}"
        return False

    async def scan(self) -> Digest:
        """The state digest of all ranks, from the words themselves; no forward pass runs."""
        return await ranks.scan(self.ranks)

    async def _whole(self, swap: Coroutine[Any, Any, float]) -> float:
        """Run a swap to its end, even if the caller is cancelled.

        Raises:
            UnavailableError: something hangs, as `failed` says.
        """
        # What hangs is said inside: outside, nobody is left once the caller was cancelled.
        return await steps.to_its_end(self._told(swap))

    async def _beside(self, limit_s: float, work: Coroutine[Any, Any, _T], what: str) -> _T:
        """What some work beside forward passes returns; given up with the caller.

        Raises:
            UnavailableError: it hangs, as `failed` says.
        """
        return await self._told(steps.within(limit_s, work, what))

    async def _told(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            return await work
        except HangsError as error:
            self.failed = str(error)
            raise UnavailableError(f"engine: {self.failed}") from error

    async def _asked(self, method: str, *args: object) -> Sequence[Any]:
        return await self.ranks.call(method, *args)

    async def _name(self, target: VersionRef, *, drop_cache: bool) -> None:
        work = self.steps.relabel(target.version, drop_cache=drop_cache)
        await steps.within(steps.FREEZE_S, work, f"naming version {target.version}")

    def _frozen(self) -> AbstractAsyncContextManager[float]:
        return steps.frozen(self.steps, drain_s=self.drain_s, may_thaw=self._is_sound)

    def _is_sound(self) -> bool:
        self.failed = self.failed or self._doubt
        return not self.failed

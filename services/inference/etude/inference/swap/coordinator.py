"""Two-phase commit of a swap over the ranks of one forward pass: all of them activate, or none."""

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
from etude.common.weights.tensors.digest import ZERO, Digest
from etude.common.weights.tensors.schema import Schema
from etude.inference.swap import deadlines, forward_gate, ranks
from etude.inference.swap.deadlines import HangsError, PhaseLimits
from etude.inference.swap.forward_gate import ForwardGate
from etude.inference.swap.ranks import PreparedSwap, RankError, Ranks


class UndoEntry(NamedTuple):
    """A version whose words can be restored from memory."""

    ref: VersionRef
    num_bytes: int
    """Memory that its old words take on all ranks."""


@dataclass(slots=True)
class UndoStack:
    """Versions before the live one whose words the ranks still hold."""

    entries: list[UndoEntry] = field(default_factory=list)
    """Oldest first."""

    @property
    def depth(self) -> int:
        """Number of versions that can be undone."""
        return len(self.entries)

    @property
    def num_bytes(self) -> int:
        """Memory that all ranks hold for undoing."""
        return sum(older.num_bytes for older in self.entries)

    @property
    def newest(self) -> VersionRef | None:
        """Version that undoing the last swap restores; None if it cannot be undone."""
        return self.entries[-1].ref if self.entries else None

    def can_restore(self, state: str) -> bool:
        """True if words with this state digest can be restored."""
        return any(older.ref.state == state for older in self.entries)

    def trim(self, newest: int) -> None:
        """Drop all but the newest entries."""
        self.entries = self.entries[len(self.entries) - newest :]

    def push(self, ref: VersionRef, num_bytes: int) -> None:
        """Add the version that was live until now."""
        self.entries.append(UndoEntry(ref, num_bytes))

    def pop(self) -> VersionRef:
        """Remove and return the version that an undo has restored."""
        return self.entries.pop().ref


_T = TypeVar("_T")


class _PendingSwap(NamedTuple):
    """The prepared change of all ranks, and its version."""

    target: VersionRef
    prepared: PreparedSwap


@dataclass(slots=True)
class SwapCoordinator:
    """Coordinator of swaps; checks every one against the state digest."""

    ranks: Ranks
    gate: ForwardGate
    may_load: bool = True
    """True if ranks may load a changed tensor that cannot be written in place."""
    live: VersionRef | None = None
    """The version served; None before the first."""
    max_undo: int = 1
    """Most versions whose old words ranks keep."""
    drain_s: float = 600.0
    """Longest wait for running requests, in pause mode Drain."""
    failed: str = ""
    """Reason why the live words are unreliable; empty while they are sound."""
    schema_sha256: str = ""
    """Digest of the schema that the ranks are mapped to."""
    num_undone: int = 0
    """Swaps that failed half-way and were undone."""
    regions: Regions = field(default_factory=dict)
    """Parts of the tensors that all ranks together hold."""
    undo_stack: UndoStack = field(default_factory=UndoStack)
    """Versions that can be restored from memory."""
    _limits: PhaseLimits = field(default_factory=PhaseLimits)
    _state: Digest = ZERO
    _pending: _PendingSwap | None = None
    _doubt: str = ""
    """Text for `failed` if the running swap does not succeed."""

    @property
    def state(self) -> str:
        """Digest of all live words, as the sum of the applied changes."""
        return self._state.hex()

    async def build_map(self, schema: Schema) -> None:
        """Map a schema to the ranks; only before the first version.

        Raises:
            CorruptError: it does not describe the model.
            ComputedParameterError: no map reaches all of the model, and nothing may be loaded.
            UnavailableError: a version is live, which mapping would destroy.
        """
        if self.live is not None:
            self.failed = "the tensors of the policy changed: restart the replica to map them"
            raise UnavailableError(f"engine: {self.failed}")
        began = time.perf_counter()
        mapped = await ranks.build_map(self.ranks, schema, may_load=self.may_load)
        self.regions, self._state = mapped.regions, mapped.state
        self._limits = PhaseLimits(
            map_s=time.perf_counter() - began, uses_loader=mapped.uses_loader
        )
        self.schema_sha256 = schema.sha256

    async def prepare(
        self, staged: Path, target: VersionRef, *, base: VersionRef | None, keep_old: bool = True
    ) -> int:
        """Gather the changes of a staged version on all ranks, while requests run.

        Args:
            staged: blocks on local disk, every byte verified.
            target: the live version after the activation.
            base: version that the blocks build on; None for complete ones.
            keep_old: whether it can be undone, at the cost of keeping all old words.

        Returns:
            Memory that the ranks hold for it, in bytes.

        Raises:
            CorruptError: it does not lead to the target's state; nothing was written.
            RankError: a rank has no memory for it, or fails.
            UnavailableError: the engine cannot go on, or a rank hangs, as `failed` says.
        """
        self._pending, began = None, time.perf_counter()
        if base is not None and base.state != self._state.hex():
            raise CorruptError(
                f"version {target.version} builds on state {base.state} of {base.version}, "
                f"the live state is {self._state.hex()}"
            )
        depth = self.undo_stack.depth
        kept = min(depth, self.max_undo - 1) if keep_old else 0
        with crossing(UnavailableError, f"version {target.version} is no longer staged"):
            num_bytes = (await asyncio.to_thread(staged.stat)).st_size
        limit_s = self._limits.prepare_limit_s(num_bytes)
        asked = self._call_ranks("prepare", str(staged), keep_old, depth, kept)
        await self._run_concurrently(limit_s, asked, f"preparing version {target.version}")
        self.undo_stack.trim(kept)
        work = ranks.wait_prepared(self.ranks)
        found = await self._run_concurrently(limit_s, work, f"preparing version {target.version}")
        self._limits.record_prepare(time.perf_counter() - began)
        predicted = self._state.plus(found.change).hex()
        if predicted != target.state:
            raise CorruptError(
                f"version {target.version} would lead to state {predicted}, "
                f"its manifest says {target.state}"
            )
        self._pending = _PendingSwap(target, found)
        return found.num_bytes

    async def activate(self) -> float:
        """Activate the prepared version on all ranks, or on none.

        Returns:
            How long requests were frozen, in seconds.

        Raises:
            RankError: a rank failed; the old version serves, or `failed` says that none can.
            UnavailableError: running requests did not end; or something hangs, as `failed` says.
            RuntimeError: nothing is prepared.
        """
        if self._pending is None:
            raise RuntimeError("activate() needs a prepare() that succeeded")
        prepared, self._pending = self._pending, None
        return await self._run_to_end(self._activate(prepared))

    async def _activate(self, prepared: _PendingSwap) -> float:
        target, found = prepared
        async with self._frozen() as began:
            # Not `failed` yet: requests that arrive meanwhile wait instead of being refused.
            self._doubt = f"the swap to {target.version} failed half-way and could not be undone"
            if not found.is_undoable:
                self._doubt += ": it was too large to keep the old words in memory"
            await self._write(target)
            # Entries cached under a version that was rolled back must not be read again.
            is_back = self.live is not None and target.number < self.live.number
            await self._relabel_engine(target, drop_cache=is_back)
            self._state = self._state.plus(found.change)
            if not found.is_undoable:
                self.undo_stack.trim(0)
            elif self.live is not None:
                self.undo_stack.push(self.live, found.num_bytes)
            self.live = target
            self._doubt = ""
        return time.perf_counter() - began

    async def _write(self, target: VersionRef) -> None:
        what, limit_s = f"writing version {target.version}", self._limits.write_limit_s
        try:
            done = await deadlines.run_within(limit_s, self._call_ranks("activate"), what)
        except HangsError:
            raise  # a rank that still writes cannot undo
        except Exception as error:
            await self._undo(target)
            raise RankError(f"{what} failed: {error!r}") from error
        if not all(done):
            await self._undo(target)
            raise RankError(
                f"rank {list(done).index(False)} held other words than version "
                f"{target.version} was prepared from"
            )

    async def _undo(self, target: VersionRef) -> None:
        """Undo on all ranks, and verify it; requests stay frozen for ever if that fails."""
        what, limit_s = f"undoing version {target.version}", self._limits.undo_limit_s
        undo = self._call_ranks("undo", self.undo_stack.depth + 1)
        undone = await deadlines.run_within(limit_s, undo, what)
        state = await deadlines.run_within(limit_s, ranks.scan(self.ranks), what)
        if self.live is None:
            # No version is live: any words are right.
            self._state, self._doubt = state, ""
        elif all(undone) and state == self._state:
            self.num_undone += 1
            self._doubt = ""

    async def restore(self, target: VersionRef | None = None) -> float:
        """Restore an older version whose words are still held.

        Args:
            target: the older version, or a new name for the same words; by default the one before.

        Returns:
            How long requests were frozen, in seconds.

        Raises:
            UnavailableError: the restored words have a wrong digest.
            RuntimeError: the words are not held.
        """
        older = target or self.undo_stack.newest
        if older is None or not self.undo_stack.can_restore(older.state):
            raise RuntimeError("no older version can be restored")
        return await self._run_to_end(self._restore(older))

    async def _restore(self, older: VersionRef) -> float:
        async with self._frozen() as began:
            self._doubt = f"restoring {older.version} failed half-way"
            restored = ""
            what, limit_s = f"restoring {older.version}", self._limits.undo_limit_s
            while restored != older.state:
                undo = self._call_ranks("undo", self.undo_stack.depth)
                if not all(await deadlines.run_within(limit_s, undo, what)):
                    raise UnavailableError(f"engine: {self._doubt}")
                restored = self.undo_stack.pop().state
            await self._relabel_engine(older, drop_cache=True)
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
        return await self._run_to_end(self._relabel(target))

    async def _relabel(self, target: VersionRef) -> float:
        async with self._frozen() as began:
            self._doubt = f"naming version {target.version} failed"
            await self._relabel_engine(target, drop_cache=False)
            self.live, self._doubt = target, ""
        return time.perf_counter() - began

    async def audit(self) -> bool:
        """Verify the live words against their digest, while requests run.

        Returns:
            False if memory was damaged; `failed` then says so.

        Raises:
            UnavailableError: a rank hangs, as `failed` says.
        """
        work = ranks.scan_concurrently(self.ranks)
        found = await self._run_concurrently(
            self._limits.scan_limit_s, work, "a scan of the live words"
        )
        if found == self._state:
            return True
        self.failed = f"the live words have state {found.hex()}, not {self._state.hex()}"
        return False

    async def scan(self) -> Digest:
        """State digest of all ranks, from the live words; no forward pass runs meanwhile."""
        return await ranks.scan(self.ranks)

    async def _run_to_end(self, swap: Coroutine[Any, Any, float]) -> float:
        """Run a swap to its end, even if the caller is cancelled.

        Raises:
            UnavailableError: something hangs, as `failed` says.
        """
        # Recorded inside: a cancelled caller does not see the error.
        return await deadlines.run_to_end(self._record_hang(swap))

    async def _run_concurrently(
        self, limit_s: float, work: Coroutine[Any, Any, _T], what: str
    ) -> _T:
        """Result of work that runs concurrently with forward passes; cancelled with the caller.

        Raises:
            UnavailableError: it hangs, as `failed` says.
        """
        return await self._record_hang(deadlines.run_within(limit_s, work, what))

    async def _record_hang(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            return await work
        except HangsError as error:
            self.failed = str(error)
            raise UnavailableError(f"engine: {self.failed}") from error

    async def _call_ranks(self, method: str, *args: object) -> Sequence[Any]:
        return await self.ranks.call(method, *args)

    async def _relabel_engine(self, target: VersionRef, *, drop_cache: bool) -> None:
        work = self.gate.relabel(target.version, drop_cache=drop_cache)
        await deadlines.run_within(
            deadlines.FREEZE_LIMIT_S, work, f"naming version {target.version}"
        )

    def _frozen(self) -> AbstractAsyncContextManager[float]:
        return forward_gate.freeze_passes(self.gate, drain_s=self.drain_s, may_thaw=self._is_sound)

    def _is_sound(self) -> bool:
        self.failed = self.failed or self._doubt
        return not self.failed

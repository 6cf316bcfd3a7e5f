"""Two-phase swaps over the ranks of one forward pass: all of them, or none."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from etude.common.errors import CorruptError, UnavailableError
from etude.common.weights.protocol.manifest import VersionRef
from etude.common.weights.protocol.versions import VersionId
from etude.common.weights.replicas.regions import Regions
from etude.common.weights.tensors.digest import NOTHING, Digest
from etude.common.weights.tensors.schema import Schema
from etude.inference import coverage
from etude.inference.coverage import ComputedError

log = logging.getLogger(__name__)

FIRST_LOOK_S = 0.002
LAST_LOOK_S = 0.1
"""How often ranks are asked whether they are ready: soon at first, then seldom."""

DEADLINE_S = 60.0
"""A swap in place takes milliseconds; one that takes this long will not end."""


class Ranks(Protocol):
    """The ranks of one forward pass; each has the methods of worker.rank.Rank."""

    async def call(self, method: str, *args: object) -> Sequence[Any]:
        """One answer per rank, between two forward passes.

        Raises:
            UnavailableError: the engine cannot go on.
        """


class Steps(Protocol):
    """The forward passes around a swap."""

    async def freeze(self) -> None:
        """Return once no forward pass runs, and start none; as the pause mode says."""

    async def relabel(self, version: VersionId, *, drop_cache: bool) -> None:
        """Say which version samples from here on; only while frozen."""

    async def thaw(self) -> None:
        """Go on."""


class _Next(NamedTuple):
    """What is prepared on all ranks."""

    target: VersionRef
    change: Digest
    is_undoable: bool
    num_bytes: int


class _Older(NamedTuple):
    """A version whose words can be restored from memory."""

    ref: VersionRef
    num_bytes: int
    """What restoring it takes, on all ranks."""


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
    failed: str = ""
    """Why nothing can be promised of the live words any more; empty while all is well."""
    schema_sha256: str = ""
    """Of the schema that the ranks are mapped to."""
    undone: int = 0
    """Swaps that failed half-way and were undone."""
    regions: Regions = field(default_factory=dict)
    """Which parts of the tensors the ranks hold, together."""
    _state: Digest = NOTHING
    _next: _Next | None = None
    _olders: list[_Older] = field(default_factory=list)
    """Oldest first."""

    @property
    def state(self) -> str:
        """Digest of all live words, as the changes add up to it."""
        return self._state.hex()

    @property
    def undo_depth(self) -> int:
        """How many versions can be taken back without reading the store."""
        return len(self._olders)

    @property
    def undo_bytes(self) -> int:
        """Memory that all ranks hold for that."""
        return sum(older.num_bytes for older in self._olders)

    @property
    def previous(self) -> VersionRef | None:
        """What undoing the last swap leads back to; None where nothing does."""
        return self._olders[-1].ref if self._olders else None

    def can_restore(self, state: str) -> bool:
        """Whether words with this state digest can be restored from memory."""
        return any(older.ref.state == state for older in self._olders)

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
        try:
            flags = await self._bake(schema, loads=False)
        except ComputedError as error:
            if not self.may_load:
                raise
            log.warning("changed tensors will be loaded, not written in place: %s", error)
            flags = await self._bake(schema, loads=True)
        self._state = _total(await self.ranks.call("count", flags))
        self.schema_sha256 = schema.sha256

    async def _bake(self, schema: Schema, *, loads: bool) -> dict[str, bytes]:
        """Map a schema, and settle which rank counts what: see coverage.counting()."""
        answers = await self.ranks.call("bake", schema.to_bytes(), schema.sha256, loads)
        maps = [coverage.decoded(answer["regions"]) for answer in _checked(answers)]
        flags = await asyncio.to_thread(coverage.counting, schema, maps)
        self.regions = coverage.united(schema, maps)
        return {answer["identity"]: flag for answer, flag in zip(answers, flags, strict=True)}

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
            UnavailableError: a rank has no memory for it, or the engine cannot go on.
        """
        self._next = None
        if base is not None and base.state != self._state.hex():
            raise CorruptError(
                f"version {target.version} builds on state {base.state} of {base.version}, "
                f"the live state is {self._state.hex()}"
            )
        kept = min(len(self._olders), self.max_undo - 1) if keep_old else 0
        await self.ranks.call("prepare", str(staged), keep_old, len(self._olders), kept)
        self._olders = self._olders[len(self._olders) - kept :]
        answers = _checked(await self._answers("prepared"))
        change = _sum(answers)
        predicted = self._state.plus(change).hex()
        if predicted != target.state:
            raise CorruptError(
                f"version {target.version} would lead to state {predicted}, "
                f"its manifest says {target.state}"
            )
        num_bytes = sum(int(answer["num_bytes"]) for answer in answers)
        is_undoable = all(answer["is_undoable"] for answer in answers)
        self._next = _Next(target, change, is_undoable, num_bytes)
        return num_bytes

    async def _answers(self, method: str) -> Sequence[Any]:
        """What ranks say, once all have something to say."""
        wait_s = FIRST_LOOK_S
        answers: Sequence[Any] = ()
        while True:
            now = await self.ranks.call(method)
            # A rank says it once, and not every rank is done at the same time.
            answers = [n if o is None else o for o, n in zip(answers or now, now, strict=True)]
            if all(answer is not None for answer in answers):
                return answers
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LAST_LOOK_S)

    async def commit(self) -> float:
        """Write what was prepared on all ranks, or on none.

        Returns:
            How long requests were frozen, in seconds.

        Raises:
            UnavailableError: a rank failed; the old version serves, or `failed` says that
                none can.
            RuntimeError: nothing is prepared.
        """
        if self._next is None:
            raise RuntimeError("commit() needs a prepare() that succeeded")
        prepared, self._next = self._next, None
        return await self._whole(self._commit(prepared))

    async def _commit(self, prepared: _Next) -> float:
        target = prepared.target
        async with self._frozen() as began:
            self.failed = f"the swap to {target.version} failed half-way and could not be undone"
            if not prepared.is_undoable:
                self.failed += ": it was too large to keep the old words beside the live ones"
            await self._write(target)
            # What was cached under a version that was left on purpose must not be read again.
            is_back = self.live is not None and target.number < self.live.number
            await self.steps.relabel(target.version, drop_cache=is_back)
            self._state = self._state.plus(prepared.change)
            if not prepared.is_undoable:
                self._olders = []
            elif self.live is not None:
                self._olders.append(_Older(self.live, prepared.num_bytes))
            self.live = target
            self.failed = ""
        return time.perf_counter() - began

    async def _write(self, target: VersionRef) -> None:
        try:
            done = await self.ranks.call("commit")
        except Exception:
            await self._take_back()
            raise
        if not all(done):
            await self._take_back()
            raise UnavailableError(
                f"rank {list(done).index(False)} held other words than version "
                f"{target.version} was prepared from"
            )

    async def _take_back(self) -> None:
        """Undo on all ranks, and prove it; requests stay frozen for ever if that fails."""
        undone = await self.ranks.call("undo", len(self._olders) + 1)
        state = await self.scan()
        if self.live is None:
            # Nothing was served, and nothing is: the words may be anything.
            self._state, self.failed = state, ""
        elif all(undone) and state == self._state:
            self.undone += 1
            self.failed = ""

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
        older = target or self.previous
        if older is None or not self.can_restore(older.state):
            raise RuntimeError("there is nothing to go back to")
        return await self._whole(self._revert(older))

    async def _revert(self, older: VersionRef) -> float:
        async with self._frozen() as began:
            self.failed = f"going back to {older.version} failed half-way"
            restored = ""
            while restored != older.state:
                if not all(await self.ranks.call("undo", len(self._olders))):
                    raise UnavailableError(f"engine: {self.failed}")
                restored = self._olders.pop().ref.state
            await self.steps.relabel(older.version, drop_cache=True)
            self._state, self.live = Digest.parse(older.state), older
            self.failed = ""
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
            await self.steps.relabel(target.version, drop_cache=False)
            self.live = target
        return time.perf_counter() - began

    async def audit(self) -> bool:
        """Whether the live words still are what was promised, while requests run.

        Returns:
            False if memory was damaged; `failed` then says so.
        """
        await self.ranks.call("start_scan")
        found = _total(await self._answers("scanned"))
        if found == self._state:
            return True
        self.failed = f"the live words have state {found.hex()}, not {self._state.hex()}"
        return False

    async def scan(self) -> Digest:
        """The state digest of all ranks, from the words themselves; no forward pass runs."""
        return _total(await self.ranks.call("scan"))

    async def _whole(self, swap: Coroutine[Any, Any, float]) -> float:
        """Run a swap to its end, even if the caller is cancelled.

        Raises:
            UnavailableError: it hangs, and was given up.
        """
        task = asyncio.create_task(swap, name="swap-weights")
        _, late = await asyncio.wait({task}, timeout=DEADLINE_S)
        if late:
            task.cancel()
            self.failed = self.failed or f"a swap took over {DEADLINE_S:.0f} s"
            raise UnavailableError(f"engine: {self.failed}")
        return await task

    @asynccontextmanager
    async def _frozen(self) -> AsyncIterator[float]:
        began = time.perf_counter()
        await self.steps.freeze()
        try:
            yield began
        finally:
            if not self.failed:
                await self.steps.thaw()


def _checked(answers: Sequence[Any]) -> Sequence[Any]:
    for rank, answer in enumerate(answers):
        if answer["error"]:
            error = CorruptError if answer["is_corrupt"] else UnavailableError
            if answer.get("is_computed"):
                error = ComputedError
            raise error(f"rank {rank}: {answer['error']}")
    return answers


def _sum(answers: Sequence[Any]) -> Digest:
    return _total([answer["digest"] for answer in answers])


def _total(digests: Sequence[str]) -> Digest:
    return reduce(Digest.plus, map(Digest.parse, digests), NOTHING)

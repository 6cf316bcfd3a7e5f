"""Two-phase swaps over the ranks of one forward pass: all of them, or none."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from etude.common.errors import CorruptError, UnavailableError
from etude.common.weights.digest import NOTHING, Digest
from etude.common.weights.manifest import VersionRef
from etude.common.weights.schema import Schema
from etude.common.weights.versions import VersionId

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


@dataclass(slots=True)
class Swap:
    """The coordinator: every step is checked against the state digest."""

    ranks: Ranks
    steps: Steps
    may_load: bool = True
    """Whether ranks may load a changed tensor where it cannot be written in place."""
    live: VersionRef | None = None
    """What is served; None before the first version."""
    previous: VersionRef | None = None
    """What undoing the last swap leads back to; None where nothing does."""
    failed: str = ""
    """Why nothing can be promised of the live words any more; empty while all is well."""
    schema_sha256: str = ""
    """Of the schema that the ranks are mapped to."""
    undone: int = 0
    """Swaps that failed half-way and were undone."""
    _state: Digest = NOTHING
    _next: _Next | None = None

    async def bake(self, schema: Schema) -> None:
        """Map a schema to the ranks; only before the first version.

        Raises:
            CorruptError: it does not describe the model.
            UnavailableError: something is being served, which the map would destroy.
        """
        if self.live is not None:
            self.failed = "the tensors of the policy changed; a restart maps the new ones"
            raise UnavailableError(f"engine: {self.failed}")
        answers = await self.ranks.call("bake", schema.to_bytes(), schema.sha256, self.may_load)
        self._state = _sum(_checked(answers))
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
            UnavailableError: a rank has no memory for it, or the engine cannot go on.
        """
        self._next = None
        if base is not None and base.state != self._state.hex():
            raise CorruptError(
                f"version {target.version} builds on state {base.state} of {base.version}, "
                f"the live state is {self._state.hex()}"
            )
        await self.ranks.call("prepare", str(staged), keep_old)
        self.previous = None
        answers = _checked(await self._answers("prepared"))
        change = _sum(answers)
        predicted = self._state.plus(change).hex()
        if predicted != target.state:
            raise CorruptError(
                f"version {target.version} would lead to state {predicted}, "
                f"its manifest says {target.state}"
            )
        self._next = _Next(target, change, keep_old)
        return sum(int(answer["num_bytes"]) for answer in answers)

    async def _answers(self, method: str) -> Sequence[Any]:
        """What ranks say, once all have something to say."""
        wait_s = FIRST_LOOK_S
        while True:
            answers = await self.ranks.call(method)
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
            await self._write(target)
            await self.steps.relabel(target.version, drop_cache=False)
            self._state = self._state.plus(prepared.change)
            self.previous = self.live if prepared.is_undoable else None
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
        undone = await self.ranks.call("undo")
        state = await self.scan()
        if self.live is None:
            # Nothing was served, and nothing is: the words may be anything.
            self._state, self.failed = state, ""
        elif all(undone) and state == self._state:
            self.undone += 1
            self.failed = ""

    async def revert(self) -> float:
        """Go back to the version before the live one, whose words are still held.

        Returns:
            How long requests were frozen, in seconds.

        Raises:
            UnavailableError: the words are not what they must be.
            RuntimeError: they are not held.
        """
        if self.previous is None:
            raise RuntimeError("there is nothing to go back to")
        older, self.previous = self.previous, None
        return await self._whole(self._revert(older))

    async def _revert(self, older: VersionRef) -> float:
        async with self._frozen() as began:
            self.failed = f"going back to {older.version} failed half-way"
            if not all(await self.ranks.call("undo")):
                raise UnavailableError(f"engine: {self.failed}")
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
            self.live, self.previous = target, None
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
            raise error(f"rank {rank}: {answer['error']}")
    return answers


def _sum(answers: Sequence[Any]) -> Digest:
    return _total([answer["digest"] for answer in answers])


def _total(digests: Sequence[str]) -> Digest:
    return reduce(Digest.plus, map(Digest.parse, digests), NOTHING)

"""A numpy engine behind the replica's seam: real ranks, real memory, and faults on order."""

import asyncio
import functools
import multiprocessing
import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from tests.harness.chaos import layout, spawning
from tests.harness.chaos.journal import Journal
from tests.harness.chaos.stores import ChaosStore
from typing_extensions import override

from etude.common.errors import CorruptError, UnavailableError
from etude.common.weights import VersionId
from etude.common.weights.replicas.live_weights import LiveWeights
from etude.common.weights.tensors.schema import Schema
from etude.common.weights.tensors.words import word_type
from etude.inference.engine.interface import EngineInfo, PolicyEngine, SampleRequest, TokenChunk
from etude.inference.swap.coordinator import SwapCoordinator
from etude.inference.swap.forward_gate import ForwardGate
from etude.inference.swap.ranks import Ranks
from etude.inference.worker.pending_change import UndoableChange
from etude.inference.worker.rank import Rank

INJECTED = "no memory for what is prepared (injected)"


class ChaosRank(Rank):
    """A rank whose words lie in files, and that can die in the middle of a commit."""

    def commit_half(self) -> bool:
        """Write some of what was prepared, and fail."""
        change = self._change
        assert isinstance(change, UndoableChange)
        some = change.prepared.patches[: len(change.prepared.patches) // 2]
        change.live.write(change.prepared._replace(patches=some))
        return False


def _open_live(
    folder: Path, rank: int, ranks: int, schema: Schema, _may_load: object = None
) -> LiveWeights:
    regions = layout.regions(schema, rank, ranks)
    sizes: dict[str, int] = {}
    types: dict[str, np.dtype[np.unsignedinteger]] = {}
    for place, held in regions.items():
        for region in held:
            sizes[region.parameter] = max(sizes.get(region.parameter, 0), region.parameter_stop)
            types[region.parameter] = word_type(schema.tensors[place].dtype)
    folder.mkdir(parents=True, exist_ok=True)
    words = {
        name: np.memmap(layout.file_of(folder, rank, name), types[name], "w+", shape=(size,))
        for name, size in sizes.items()
    }
    return LiveWeights(schema, words, regions)


def make_rank(folder: Path, rank: int, ranks: int) -> ChaosRank:
    """A rank that maps its words when it learns the schema."""
    return ChaosRank(functools.partial(_open_live, folder, rank, ranks))


def _serve(folder: Path, rank: int, ranks: int, link: Connection) -> None:
    """A rank process: one call after the other."""
    spawning.end_with_parent()
    mine = make_rank(folder, rank, ranks)
    while True:
        method, args = link.recv()
        link.send(getattr(mine, method)(*args))


@dataclass(slots=True)
class ChaosRanks(Ranks):
    """One rank in this process, or several in processes of their own; fails on order."""

    folder: Path
    ranks: int
    journal: Journal
    armed: list[str] = field(default_factory=list)
    """prepare, commit, undo: the next of each fails."""
    held: threading.Event = field(default_factory=threading.Event)
    """While it is not set, no prepare ends."""
    gone: str = ""
    keeps_old: bool = False
    """Whether what is prepared can be undone: only then a commit may fail."""
    pids: list[int] = field(default_factory=list)
    _links: list[Connection] = field(default_factory=list)
    _here: ChaosRank | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.held.set()
        if self.ranks == 1:
            self._here = make_rank(self.folder, 0, 1)
            return
        context = multiprocessing.get_context("fork")  # before any thread was started
        for rank in range(self.ranks):
            link, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(self.folder, rank, self.ranks, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._links.append(link)
            assert process.pid is not None
            self.pids.append(process.pid)

    @override
    async def call(self, method: str, *args: object) -> Sequence[Any]:
        if method == "poll_prepared":
            await asyncio.to_thread(self.held.wait)
        if method == "prepare":
            self.keeps_old = bool(args[1])
        if method == "activate" and self.keeps_old and self._fires("commit"):
            return await asyncio.to_thread(self._half_way)
        if method == "undo" and self._fires("undo"):
            return [False] * self.ranks
        answers = await asyncio.to_thread(self._all, method, args)
        if method == "poll_prepared" and None not in answers and self._fires("prepare"):
            answers[-1] = {"error": INJECTED, "is_corrupt": False}
        return answers

    def _fires(self, method: str) -> bool:
        if method not in self.armed:
            return False
        self.armed.remove(method)
        self.journal.write("fault", fault=f"rank fails in {method}")
        return True

    def _half_way(self) -> list[Any]:
        """The first rank writes some or all of its words, the last one fails."""
        return self._asked([*["activate"] * (self.ranks - 1), "commit_half"], ())

    def _all(self, method: str, args: Sequence[object]) -> list[Any]:
        return self._asked([method] * self.ranks, args)

    def _asked(self, methods: Sequence[str], args: Sequence[object]) -> list[Any]:
        """What each rank answers to its method; one question at a time."""
        with self._lock:
            if self._here is not None:
                return [getattr(self._here, methods[0])(*args)]
            return self._over_links(methods, args)

    def _over_links(self, methods: Sequence[str], args: Sequence[object]) -> list[Any]:
        try:
            for link, method in zip(self._links, methods, strict=True):
                link.send((method, args))
            return [link.recv() for link in self._links]
        except (EOFError, OSError) as cause:
            self.gone = "a rank process ended"
            raise UnavailableError(f"engine: {self.gone}") from cause


class TalkingSwap(SwapCoordinator):
    """Writes down what it refuses: the receiver may find another way, and say nothing."""

    journal: Journal

    @override
    async def prepare(self, *args: Any, **kwargs: Any) -> int:
        try:
            return await super().prepare(*args, **kwargs)
        except CorruptError as error:
            self.journal.write("refused", reason=error.reason, text=str(error)[:300])
            raise


@dataclass(slots=True)
class ChaosEngine(PolicyEngine, ForwardGate):
    """Labels and locks; the forward passes are the server's."""

    info: EngineInfo
    ranks: ChaosRanks
    journal: Journal
    store: ChaosStore
    swap: TalkingSwap = field(init=False)
    step: threading.Lock = field(default_factory=threading.Lock)
    """Held during a forward pass, and during a swap."""
    label: VersionId | None = None

    def __post_init__(self) -> None:
        self.swap = TalkingSwap(self.ranks, self)
        self.swap.journal = self.journal

    @property
    @override
    def live(self) -> VersionId | None:
        """The version that is served."""
        return self.label

    @property
    @override
    def failed(self) -> str:
        """Why the engine cannot go on."""
        return self.ranks.gone or self.swap.failed

    @override
    async def freeze(self) -> None:
        await asyncio.to_thread(self.step.acquire)

    @override
    async def relabel(self, version: VersionId, *, drop_cache: bool) -> None:
        asked = self.store.asked.pop(version.epoch + 1, None)
        self.journal.write("live", version=str(version), asked=asked)
        self.label = version

    @override
    async def thaw(self) -> None:
        self.step.release()

    @override
    def generate(self, request: SampleRequest) -> AsyncGenerator[TokenChunk, None]:
        raise NotImplementedError("the server hashes instead")

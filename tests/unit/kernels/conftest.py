"""What every kernel's tests share: where they run, an oracle, and a watch over Triton bodies."""

import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from etude.kernels import dispatch

# Loaded here too: on a GPU machine these tests run without the conftest above them.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")

SEEDS = (0, 0xA5A5A5A5A5A5A5A5)


class Digests:
    """The state digest by its formula, one lane at a time."""

    @staticmethod
    def mix(lane: int, word: int, seed: int) -> int:
        z = (seed + lane * 0x9E3779B97F4A7C15 + word * 0xD1B54A32D192ED03) % (1 << 64)
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % (1 << 64)
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % (1 << 64)
        return z ^ (z >> 31)

    def of(self, words: Iterable[int], lanes: Iterable[int], bits: int) -> tuple[int, int]:
        """Digest of elements, each with its first lane."""
        pieces = [
            (lane + part, (word >> (16 * part)) & 0xFFFF)
            for word, lane in zip(words, lanes, strict=True)
            for part in range(max(1, bits // 16))
        ]
        a, b = (sum(self.mix(lane, word, seed) for lane, word in pieces) for seed in SEEDS)
        return a % (1 << 64), b % (1 << 64)


class Watch:
    """Every access of interpreted Triton programs: inside an argument, and no two in a race.

    The interpreter itself reads and writes any address it is given, and runs programs one after
    the other, so that a body may be wrong on a GPU and right here. Every second launch runs its
    programs from the last to the first. The names wrapped are Triton's internals.
    """

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.grid = (1, 1, 1)
        self.program = 0
        self.launches = 0
        self.loads: list[tuple[int, Any]] = []
        self.stores: list[tuple[int, Any]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime import interpreter  # noqa: PLC0415  only this lane has it

        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        load, store = builder.create_masked_load, builder.create_masked_store
        place, dim = builder.set_grid_idx, builder.set_grid_dim
        arguments, call = executor._init_args_hst, executor.__call__

        def watched_load(this, ptrs, mask, *rest, **more):
            self.note(self.loads, ptrs, mask)
            return load(this, ptrs, mask, *rest, **more)

        def watched_store(this, ptrs, value, mask, *rest, **more):
            self.note(self.stores, ptrs, mask)
            return store(this, ptrs, value, mask, *rest, **more)

        def watched_place(this, x, y, z):
            self.program = self.grid[0] - 1 - x if self.launches % 2 else x
            return place(this, self.program, y, z)

        def watched_dim(this, *grid):
            self.grid = grid
            return dim(this, *grid)

        def watched_arguments(this, args, kwargs):
            seen = arguments(this, args, kwargs)
            tensors = [t for t in (*seen[0], *seen[1].values()) if isinstance(t, torch.Tensor)]
            self.ranges = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors]
            return seen

        def watched_call(this, *args, **kwargs):
            self.loads, self.stores = [], []
            self.launches += 1
            call(this, *args, **kwargs)
            self.judge()

        monkeypatch.setattr(builder, "create_masked_load", watched_load)
        monkeypatch.setattr(builder, "create_masked_store", watched_store)
        monkeypatch.setattr(builder, "set_grid_idx", watched_place)
        monkeypatch.setattr(builder, "set_grid_dim", watched_dim)
        monkeypatch.setattr(executor, "_init_args_hst", watched_arguments)
        monkeypatch.setattr(executor, "__call__", watched_call)

    def note(self, accesses: list[tuple[int, Any]], ptrs: Any, mask: Any) -> None:
        wide, chosen = np.broadcast_arrays(ptrs.data, mask.data)
        addresses = np.unique(wide[chosen.astype(bool)].astype(np.int64))
        width = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        inside = np.zeros(addresses.shape, bool)
        for start, stop in self.ranges:
            inside |= (addresses >= start) & (addresses + width <= stop)
        assert inside.all(), f"program {self.program}: {(~inside).sum()} accesses out of bounds"
        accesses.append((self.program, addresses))

    def judge(self) -> None:
        stored = self.owners(self.stores)
        assert np.unique(stored[0]).size == stored[0].size, "two programs store to one address"
        loaded = self.owners(self.loads)
        if stored[0].size and loaded[0].size:
            spots = np.searchsorted(stored[0], loaded[0]).clip(max=stored[0].size - 1)
            crossed = (stored[0][spots] == loaded[0]) & (stored[1][spots] != loaded[1])
            assert not crossed.any(), "a program loads what another one stores"

    @staticmethod
    def owners(accesses: list[tuple[int, Any]]) -> Any:
        """Addresses, rising, and the program of each; a pair once. [2, k]"""
        pairs = [np.stack([a, np.full(a.shape, program)]) for program, a in accesses]
        return np.unique(np.concatenate(pairs or [np.zeros((2, 0), np.int64)], axis=1), axis=1)


@pytest.fixture(scope="session", autouse=True)
def watch() -> Iterator[None]:
    """Under the interpreter: accesses watched, and fresh memory poisoned instead of zero."""
    if not dispatch.INTERPRETED:
        yield
        return
    with pytest.MonkeyPatch.context() as monkeypatch:
        Watch().install(monkeypatch)
        torch.use_deterministic_algorithms(True)  # noqa: FBT003  torch's signature
        yield
        torch.use_deterministic_algorithms(False)  # noqa: FBT003  torch's signature


@pytest.fixture(scope="session")
def digests() -> Digests:
    """Python integers, which never wrap by themselves."""
    return Digests()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the tensors are: the CPU, but for a run on a GPU machine."""
    return torch.device(os.environ.get("ETUDE_TEST_DEVICE", "cpu"))

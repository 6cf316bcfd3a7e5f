"""Allocations of a step: the storages that operations create, resize and free, in order.

A dispatch mode sees tensors with and without values alike, so a step can be planned that would not
fit. Memory that a kernel takes and frees inside one operation is not seen.
"""

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from etude.trainer.model.parameters import local_shard


class Kind(StrEnum):
    """Use of a storage."""

    WEIGHTS = "weights"
    """Parameters and buffers, this rank's shards."""
    GRADIENTS = "gradients"
    """Of these shards, between two steps."""
    MOMENTS = "moments"
    """Of the optimiser."""
    GATHERED = "gathered"
    """Complete parameters of a block, and the buffers of the collectives that carry them."""
    ACTIVATIONS = "activations"
    """Kept from the forward pass for the backward pass."""
    CHECKPOINT = "checkpoint"
    """Copy of this rank's shards and moments, from which a checkpoint is stored during steps."""
    TEMPORARIES = "temporaries"
    """All else: results inside a pass, recomputed activations, complete gradients of a block."""


class Peak(NamedTuple):
    """The moment of a step at which most memory is in use."""

    num_bytes: int
    by_kind: Mapping[Kind, int]
    """Bytes in use then; they add up to the peak."""
    num_elsewhere: int = 0
    """Most bytes in use of the kinds that lie in another memory."""


class _Change(NamedTuple):
    storage: int
    """Number of the storage."""
    num_bytes: int
    """Allocated; freed if negative."""


class _Live(NamedTuple):
    number: int
    size: int
    reference: "weakref.ref[UntypedStorage]"


# Receivers of an all-gather, and senders of a reduce-scatter: the place among the arguments.
_COLLECTIVES: Mapping[object, int] = {
    torch.ops.c10d._allgather_base_.default: 0,
    torch.ops.c10d._reduce_scatter_base_.default: 1,
}


class _Pause:
    """A block in which nothing is recorded."""

    is_entered = False

    def __enter__(self) -> None:
        self.is_entered = True

    def __exit__(self, *error: object) -> None:
        self.is_entered = False


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Records the allocations inside a block; not to be entered twice."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._changes: list[_Change] = []
        self._live: dict[int, _Live] = {}
        """By address of the storage's Python object, which lives as long as the storage."""
        self._kinds: dict[int, Kind] = {}
        """By number; storages without one are temporaries."""
        self._num_storages = 0
        self._pause = _Pause()

    def assign(self, kind: Kind, tensors: Iterable[Tensor]) -> None:
        """Say what tensors are used for, or their shards."""
        for tensor in tensors:
            self._kinds[self._record(local_shard(tensor).untyped_storage())] = kind

    def assign_live(self, kind: Kind) -> None:
        """Say what all storages are used for that exist now and are of no known kind."""
        for live in self._live.values():
            self._kinds.setdefault(live.number, kind)

    def peak(self, *, without: Collection[Kind] = ()) -> Peak:
        """Find the moment of most memory in use.

        Args:
            without: kinds that lie in another memory.
        """
        changes = [change for change in self._changes if self._kind(change) not in without]
        totals = list(itertools.accumulate((c.num_bytes for c in changes), initial=0))
        largest = max(totals)
        by_kind: Counter[Kind] = Counter()
        for change in changes[: totals.index(largest)]:
            by_kind[self._kind(change)] += change.num_bytes
        others = (c.num_bytes for c in self._changes if self._kind(c) in without)
        return Peak(
            largest,
            {kind: by_kind[kind] for kind in Kind if kind not in without},
            max(itertools.accumulate(others, initial=0)),
        )

    def _kind(self, change: _Change) -> Kind:
        return self._kinds.get(change.storage, Kind.TEMPORARIES)

    @override
    def __enter__(self) -> Self:
        # Shapes of DTensors are worked out on complete tensors that nothing else sees.
        self._lock = ShardingPropagator._fake_mode_lock
        ShardingPropagator._fake_mode_lock = self._pause  # type: ignore[assignment]
        self._resize = UntypedStorage.resize_
        # FSDP frees gathered parameters by resizing, which is no operation that a mode sees.
        UntypedStorage.resize_ = self._record_resize(self._resize)  # type: ignore[assignment, method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @override
    def __exit__(self, *error: object) -> None:
        ShardingPropagator._fake_mode_lock = self._lock
        UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes again, as an operation on shards
        result = func(*args, **(kwargs or {}))
        if not self._pause.is_entered:
            for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._record(leaf.untyped_storage())
            if func in _COLLECTIVES:
                self.assign(Kind.GATHERED, [args[_COLLECTIVES[func]]])
        return result

    def _record(self, storage: UntypedStorage) -> int:
        """Number of a storage, which may be new."""
        address = id(storage)
        live = self._live.get(address)
        if live is None:
            reference = weakref.ref(storage, partial(self._record_release, address))
            live = _Live(self._num_storages, storage.size(), reference)
            self._num_storages += 1
            self._live[address] = live
            self._changes.append(_Change(live.number, live.size))
        elif live.size != storage.size():
            self._record_size(storage)
        return live.number

    def _record_release(self, address: int, _reference: object) -> None:
        live = self._live.pop(address)
        self._changes.append(_Change(live.number, -live.size))

    def _record_resize(
        self, original: Callable[[UntypedStorage, int], UntypedStorage]
    ) -> Callable[[UntypedStorage, int], UntypedStorage]:
        def resize(storage: UntypedStorage, size: int) -> UntypedStorage:
            number = self._record(storage)
            result = original(storage, size)
            self._record_size(storage)
            self._kinds[number] = Kind.GATHERED
            return result

        return resize

    def _record_size(self, storage: UntypedStorage) -> None:
        live, size = self._live[id(storage)], storage.size()
        self._changes.append(_Change(live.number, size - live.size))
        self._live[id(storage)] = live._replace(size=size)

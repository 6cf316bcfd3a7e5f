"""Changes of parameters on a device: absolute old and new words, applied or undone."""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.common.weights.replicas import gather_kernels
from etude.common.weights.tensors.ulp import top_bit
from etude.common.weights.tensors.words import Words
from etude.inference.worker.device.parameter import DeviceParameter, split_keys, to_host_words
from etude.kernels import delta as deltas
from etude.kernels.delta import Delta
from etude.kernels.raw_words import Axis, signed

Integers = npt.NDArray[np.int64]


class RegionElements(NamedTuple):
    """Elements of a block that lie in a region."""

    flats: Integers
    """Index in the tensor. [k]"""
    picks: Integers
    """Index in the block. [k]"""


class ChangeGroup:
    """Changes of one parameter and one kind, collected block by block."""

    def __init__(self) -> None:
        self._keys: list[Integers] = []
        self._values: list[Words] = []

    def add(self, keys: Integers, values: Words) -> None:
        """Add changes: their keys from DeviceParameter.keys(), and their values."""
        self._keys.append(keys)
        self._values.append(values)

    def change(self, memory: DeviceParameter, axis: Axis) -> "KernelChange":
        """Gather the old words and compute the new ones; writes nothing."""
        keys, values = np.concatenate(self._keys), np.concatenate(self._values)
        if (keys[1:] < keys[:-1]).any():
            # Tiles of the checkpoint and of the region are not cut alike.
            order = np.argsort(keys, kind="stable")
            keys, values = keys[order], values[order]
        counts, index = split_keys(keys, memory.num_tiles)
        delta = deltas.staged_delta(
            memory.tiles,
            counts=_to_device(counts, memory),
            index=_to_device(index, memory),
            value=_to_device(values, memory),
        )
        if axis is not Axis.ABSOLUTE:
            resolved = deltas.delta_resolve(memory.raw, delta=delta, axis=axis)
            return KernelChange(memory, resolved.delta, resolved.old)
        delta = deltas.check_delta(memory.raw, delta=delta)
        prepared = deltas.delta_prepare(memory.raw, delta=delta)
        return KernelChange(memory, replace(delta, digest=prepared.digest), prepared.old)


def _to_device(array: npt.NDArray[np.generic], memory: DeviceParameter) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(memory.raw.device)


@dataclass(frozen=True, slots=True)
class KernelChange:
    """Words that kernels write."""

    memory: DeviceParameter
    delta: Delta
    """New words."""
    old: Tensor

    @property
    def digest(self) -> Tensor:
        """Difference to the state digest.  [2]."""
        return self.delta.digest

    @property
    def changed(self) -> Tensor:
        """Elements that differ.  []."""
        return (signed(self.old) != signed(self.delta.value)).sum()

    @property
    def num_bytes(self) -> int:
        """Device memory that it holds."""
        return self.delta.index.nbytes + self.delta.value.nbytes + self.old.nbytes

    def apply(self) -> Tensor:
        """Write the new words; whether one that was overwritten was neither old nor new.  []."""
        return self._any_unexpected(deltas.delta_apply(self.memory.raw, delta=self.delta))

    def undo(self) -> Tensor:
        """Write the old words; as apply()."""
        return self._any_unexpected(
            deltas.delta_undo(self.memory.raw, delta=self.delta, old=self.old)
        )

    def _any_unexpected(self, seen: Tensor) -> Tensor:
        found = signed(seen)
        return ((found != signed(self.old)) & (found != signed(self.delta.value))).any()


@dataclass(frozen=True, slots=True)
class WideChange:
    """Words of 64 bits, written by torch."""

    memory: DeviceParameter
    at: Tensor
    old: Tensor
    new: Tensor

    @classmethod
    def gather(
        cls,
        memory: DeviceParameter,
        at: Integers,
        data: Words,
        *,
        is_absolute: bool,
        is_xor: bool,
        is_ordered: bool,
    ) -> Self:
        """Gather the old words, and compute the new ones on the host."""
        gathered = memory.gather(at)
        old = to_host_words(gathered, data)
        new = np.empty_like(data)
        kind = gather_kernels.NEW if is_absolute else gather_kernels.ULP
        kind = gather_kernels.XOR if is_xor else kind
        gather_kernels.compute_new_words(
            old, data, kind, top_bit(data.dtype, ordered=is_ordered), new
        )
        numbers = torch.from_numpy(new.view(np.int64)).to(gathered.device)
        return cls(memory, torch.from_numpy(at).to(gathered.device), gathered, numbers)

    @property
    def num_bytes(self) -> int:
        """Device memory that it holds."""
        return self.at.nbytes + self.old.nbytes + self.new.nbytes

    def apply(self) -> Tensor:
        """Write the new words; whether one that was overwritten was neither old nor new.  []."""
        return self._write(self.new)

    def undo(self) -> Tensor:
        """Write the old words; as apply()."""
        return self._write(self.old)

    def _write(self, numbers: Tensor) -> Tensor:
        seen = self.memory.raw[self.at]
        self.memory.raw[self.at] = numbers
        return ((seen != self.old) & (seen != self.new)).any()

"""Live words of one rank on a device: scanned, changed and restored in place.

The host locates the changes, which is integer work; the device gathers the old words, computes the
new ones, predicts the digest, and overwrites. A region is cut into tiles of its own, so that one
launch per parameter visits all of its changes.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.common.errors import CorruptError
from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.replicas import region_kernels
from etude.common.weights.replicas.block_layout import BlockLayout
from etude.common.weights.replicas.regions import (
    HeldRegion,
    Region,
    Regions,
    held_regions,
    region_problem,
)
from etude.common.weights.replicas.staged_file import StagedBlock
from etude.common.weights.replicas.tile_decoding import decode_block
from etude.common.weights.tensors.digest import Digest
from etude.common.weights.tensors.jit import compiled, readonly
from etude.common.weights.tensors.schema import Schema
from etude.common.weights.tensors.words import Words, word_type
from etude.inference.worker.device.changes import (
    ChangeGroup,
    KernelChange,
    RegionElements,
    WideChange,
)
from etude.inference.worker.device.parameter import DeviceParameter, DigestSums, to_host_words
from etude.kernels.raw_words import Axis

Integers = npt.NDArray[np.int64]


class DevicePrepared(NamedTuple):
    """Gathered before anything is written, so that every write can be repeated and undone."""

    patches: tuple[KernelChange | WideChange, ...]
    digest: Digest
    """Difference to the state digest of the elements that this rank counts."""
    changed: int
    """Counted elements that change."""

    @property
    def num_bytes(self) -> int:
        """Device memory that it holds."""
        return sum(patch.num_bytes for patch in self.patches)


class DeviceLiveWeights:
    """`LiveWeights` for parameters on a device.

    Nothing here locks: the caller of activate() keeps readers of the words away.
    """

    def __init__(self, schema: Schema, parameters: Mapping[str, Tensor], regions: Regions) -> None:
        """Bind a map to the parameters of a rank.

        Args:
            schema: of the policy.
            parameters: contiguous 1-D views of the live memory, by name, all on one device.
            regions: which of them hold what; elements in several regions count once.

        Raises:
            ValueError: a region does not fit its tensor or its parameter.
        """
        self._layout = BlockLayout(schema)
        self._flat = dict(parameters)
        self._set_regions(regions)

    def _set_regions(self, regions: Regions) -> None:
        self.regions = {tensor: tuple(found) for tensor, found in regions.items()}
        self._held = {
            t: self._check_regions(t, found) for t, found in self.regions.items() if found
        }
        mine: dict[str, list[tuple[int, HeldRegion]]] = {name: [] for name in self._flat}
        for tensor, held in self._held.items():
            for holding in held:
                mine[holding.region.parameter].append((tensor, holding))
        offsets = self._layout.schema.offsets
        self._memory = {
            name: DeviceParameter(
                self._flat[name],
                [(holding.window, offsets[tensor]) for tensor, holding in held],
            )
            for name, held in mine.items()
        }
        self._place = {
            (tensor, n): place
            for held in mine.values()
            for place, (tensor, holding) in enumerate(held)
            for n, each in enumerate(self._held[tensor])
            if each is holding
        }
        device = next((flat.device for flat in self._flat.values()), torch.device("cpu"))
        self._side = _stream(device)

    def count(self, regions: Regions) -> None:
        """Change the regions that count in the digest; their positions stay.

        Raises:
            ValueError: a region does not fit its tensor or its parameter.
        """
        self._set_regions(regions)

    def scan(self) -> Digest:
        """The state digest of the elements that this rank counts."""
        with self._side_stream():
            sums = DigestSums()
            for tensor, held in self._held.items():
                for holding in held:
                    if holding.region.counted:
                        memory = self._memory[holding.region.parameter]
                        memory.scan(sums, holding, self._layout.schema.offsets[tensor])
            return sums.digest()

    def prepare(self, blocks: Iterable[StagedBlock]) -> DevicePrepared:
        """Gather what a version changes here; writes nothing.

        Blocks outside the regions of this rank are ignored.

        Raises:
            CorruptError: a block that its tensor cannot have, or two that overlap.
            ValueError: a block that only old words decode is not whole on this rank.
        """
        with self._side_stream():
            return self._prepare(self._layout.sort_blocks(list(blocks)))

    def write(self, prepared: DevicePrepared) -> bool:
        """Write the new words; harmless when repeated. Waits for the device once, at the end.

        Returns:
            False if an overwritten word was neither the gathered one nor already the new one:
            the live words are then wrong, and must be undone.
        """
        return _all_expected([patch.apply() for patch in prepared.patches])

    def undo(self, prepared: DevicePrepared) -> bool:
        """Write the old words back; harmless when repeated, and after half a commit.

        Returns:
            False if a word that was overwritten was neither old nor new.
        """
        return _all_expected([patch.undo() for patch in prepared.patches])

    @contextlib.contextmanager
    def _side_stream(self) -> Iterator[None]:
        """Launch on a side stream, concurrently with forward passes; synchronise at the end."""
        if self._side is None:
            yield
            return
        with torch.cuda.stream(self._side):
            yield
            self._side.synchronize()

    def _check_regions(self, tensor: int, regions: Iterable[Region]) -> list[HeldRegion]:
        spec = self._layout.schema.tensors[tensor]
        found = list(regions)
        for region in found:
            flat = self._flat.get(region.parameter)
            if flat is None:
                raise ValueError(f"tensor {spec.name!r}: no parameter {region.parameter!r}")
            fault = region_problem(region, spec, flat.numel())
            if flat.itemsize != word_type(spec.dtype).itemsize or not flat.is_contiguous():
                fault = f"{flat.dtype} with strides {flat.stride()}, not flat {spec.dtype}"
            if fault:
                raise ValueError(f"tensor {spec.name!r} in {region.parameter!r}: {fault}")
        return held_regions(found)

    def _prepare(self, blocks: list[StagedBlock]) -> DevicePrepared:
        groups: dict[tuple[str, Axis, bool], ChangeGroup] = {}
        patches: list[KernelChange | WideChange] = []
        sums = DigestSums()
        for block in blocks:
            held = self._held.get(block.tensor, [])
            met = [(n, h) for n, h in enumerate(held) if self._overlaps(block, h)]
            known = self._decoded(block, held) if met else block
            for n, holding in met:
                found = self._region_elements(known, holding)
                if not found.flats.size:
                    continue
                memory = self._memory[holding.region.parameter]
                if memory.is_wide:
                    patches.append(self._wide_change(known, holding, found, memory, sums))
                    continue
                first_tile = memory.first_tiles[self._place[block.tensor, n]]
                axis, values = self._values(known, holding, found, memory)
                keys = memory.keys(found.flats, holding.window, first_tile)
                for counts, chosen in _split_counted(found.flats, holding):
                    key = (holding.region.parameter, axis, counts)
                    groups.setdefault(key, ChangeGroup()).add(keys[chosen], values[chosen])
        for (parameter, axis, counts), group in groups.items():
            change = group.change(self._memory[parameter], axis)
            patches.append(change)
            if counts:
                sums.add(change.digest, change.changed)
        return DevicePrepared(tuple(patches), sums.digest(), sums.changed())

    def _overlaps(self, block: StagedBlock, holding: HeldRegion) -> bool:
        grain = self._layout.tile_rows(block.tensor, block.tile)
        first, last = (
            grain.base + row * grain.stride + column
            for row, column in (divmod(at, grain.columns) for at in (block.lo, block.hi - 1))
        )
        return first < holding.region.source_stop and last >= holding.region.source_offset

    def _region_elements(self, block: StagedBlock, holding: HeldRegion) -> RegionElements:
        """Elements of a block that lie in a region.

        Raises:
            CorruptError: the block's indices do not increase.
        """
        index = block.element_places
        flats, picks = np.empty(index.size, np.int64), np.empty(index.size, np.int64)
        grain, span = self._layout.tile_rows(block.tensor, block.tile), self._layout.span(block)
        count = region_kernels.place_elements(
            readonly(index), span, grain, holding.window, flats, picks
        )
        if count < 0:
            where = self._layout.describe(block.tensor, block.tile)
            raise CorruptError(f"{where}: places do not increase inside the block")
        return RegionElements(flats[:count], picks[:count])

    def _values(
        self,
        block: StagedBlock,
        holding: HeldRegion,
        found: RegionElements,
        memory: DeviceParameter,
    ) -> tuple[Axis, Words]:
        """Values from which the device computes the new words, and their meaning."""
        data = _block_data(block)[found.picks]
        if block.codec is Codec.XOR_ZSTD:
            return Axis.ABSOLUTE, to_host_words(
                memory.gather(_positions(found, holding)), data
            ) ^ data
        if block.index is None:
            return Axis.ABSOLUTE, data
        is_ordered = self._layout.schema.tensors[block.tensor].is_ordered
        return Axis.ORDERED if is_ordered else Axis.PLAIN, data

    def _wide_change(
        self,
        block: StagedBlock,
        holding: HeldRegion,
        found: RegionElements,
        memory: DeviceParameter,
        sums: DigestSums,
    ) -> WideChange:
        """Change of 64-bit words: few, and computed on the host."""
        at = _positions(found, holding)
        data = _block_data(block)[found.picks]
        change = WideChange.gather(
            memory,
            at,
            data,
            is_absolute=block.index is None,
            is_xor=block.codec is Codec.XOR_ZSTD,
            is_ordered=self._layout.schema.tensors[block.tensor].is_ordered,
        )
        if holding.region.counted:
            old, new = to_host_words(change.old, data), to_host_words(change.new, data)
            span = self._layout.span(block)
            sums.add_host(region_kernels.count_changes(old, new, found.flats, span, holding.others))
        return change

    def _decoded(self, block: StagedBlock, held: list[HeldRegion]) -> StagedBlock:
        return decode_block(block, layout=self._layout, held=held, fill=self._fill)

    def _fill(
        self, block: StagedBlock, holding: HeldRegion, old: Words, seen: npt.NDArray[np.bool_]
    ) -> None:
        found = self._region_elements(block, holding)
        memory = self._memory[holding.region.parameter]
        old[found.picks] = to_host_words(memory.gather(_positions(found, holding)), old)
        seen[found.picks] = True


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch annotates half of it


def _block_data(block: StagedBlock) -> Words:
    """The words of a block that is decoded.

    Raises:
        ValueError: it never was.
    """
    if block.data is None:
        raise ValueError("a block that was never decoded has no words")
    return block.data


def _positions(found: RegionElements, holding: HeldRegion) -> Integers:
    """Words of the parameter that hold the elements.  [k]."""
    at = np.empty(found.flats.size, np.int64)
    region_kernels.positions(found.flats, holding.window, 0, at)  # type: ignore[arg-type]  # compiled for any integers
    return at


def _split_counted(
    flats: Integers, holding: HeldRegion
) -> Iterator[tuple[bool, npt.NDArray[np.bool_] | slice]]:
    """Elements that count in the digest, then those that do not."""
    if not holding.region.counted:
        yield False, slice(None)
        return
    if not holding.others.shape[0]:
        yield True, slice(None)
        return
    counts = _are_counted(flats, holding.others)
    for value in (True, False):
        if (counts == value).any():
            yield value, counts == value


@compiled
def _are_counted(flats: Integers, others: Integers) -> npt.NDArray[np.bool_]:
    found = np.empty(flats.size, np.bool_)
    for i in range(flats.size):
        found[i] = region_kernels.is_counted(flats[i], others)
    return found


def _all_expected(strange: list[Tensor]) -> bool:
    """True if no overwritten word was unexpected; the only wait for the device."""
    return not strange or not bool(torch.stack(strange).any())

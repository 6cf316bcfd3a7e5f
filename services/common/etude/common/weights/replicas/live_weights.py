"""Live weights of one rank: words that are scanned, changed and restored (undo) in place."""

from collections.abc import Iterable, Mapping

import numpy as np

from etude.common.weights.replicas import region_kernels
from etude.common.weights.replicas.block_layout import BlockLayout
from etude.common.weights.replicas.patches import Patch, PreparedPatches
from etude.common.weights.replicas.preparation import Preparation
from etude.common.weights.replicas.regions import (
    HeldRegion,
    Region,
    Regions,
    held_regions,
    identity_regions,
    region_problem,
    slice_regions,
)
from etude.common.weights.replicas.staged_file import StagedBlock
from etude.common.weights.tensors import digest
from etude.common.weights.tensors.digest import Digest
from etude.common.weights.tensors.schema import Schema
from etude.common.weights.tensors.words import Words, word_type

__all__ = ["LiveWeights", "Patch", "PreparedPatches", "Region", "identity_regions", "slice_regions"]


class LiveWeights:
    """Parameters as writable words, and the map from the checkpoint's coordinates to them.

    Nothing here locks: the caller sees to it that no reader runs during a write.
    """

    def __init__(self, schema: Schema, parameters: Mapping[str, Words], regions: Regions) -> None:
        """Bind a map to the words of a rank.

        Args:
            schema: of the policy.
            parameters: writable, contiguous 1-D views of the live memory, by name.
            regions: which of them hold what; elements in several regions count once.

        Raises:
            ValueError: a region does not fit its tensor or its parameter.
        """
        self._layout = BlockLayout(schema)
        self._words = dict(parameters)
        self._set_regions(regions)

    def _set_regions(self, regions: Regions) -> None:
        self.regions = {tensor: tuple(found) for tensor, found in regions.items()}
        self._held = {
            tensor: _holdings(self._layout.schema, tensor, list(found), self._words)
            for tensor, found in regions.items()
        }

    def count(self, regions: Regions) -> None:
        """Count other regions than before in the digest; they lie where they lay.

        Raises:
            ValueError: a region does not fit its tensor or its parameter.
        """
        self._set_regions(regions)

    def scan(self) -> Digest:
        """The state digest of the elements that this rank counts."""
        total = digest.ZERO
        for tensor, held in self._held.items():
            first_lane = self._layout.schema.offsets[tensor]
            for holding in held:
                if holding.region.counted:
                    words = self._words[holding.region.parameter]
                    sums = region_kernels.scan(words, holding.window, first_lane, holding.others)
                    total = total.plus(Digest(int(sums[0]), int(sums[1])))
        return total

    def prepare(self, blocks: Iterable[StagedBlock]) -> PreparedPatches:
        """Gather what a version changes here; writes nothing.

        Blocks outside the regions of this rank are ignored.

        Raises:
            CorruptError: a block that its tensor cannot have, or two that overlap.
            ValueError: a block that only old words decode is not whole on this rank.
        """
        return Preparation(self._layout, self._words, self._held).run(blocks)

    def write(self, prepared: PreparedPatches) -> bool:
        """Write the new words; harmless when repeated.

        Returns:
            False if a word that was overwritten was neither the one that was gathered nor
            already the new one: then what is live now was never promised, and must be undone.
        """
        return sum(self._overwrite(p, p.old, p.new) for p in prepared.patches) == 0

    def undo(self, prepared: PreparedPatches) -> bool:
        """Write the old words back; harmless when repeated, and after half a commit.

        Returns:
            False if a word that was overwritten was neither old nor new.
        """
        patches = reversed(prepared.patches)
        return sum(self._overwrite(p, p.new, p.old) for p in patches) == 0

    def _overwrite(self, patch: Patch, old: Words, new: Words) -> int:
        words = self._words[patch.parameter]
        return region_kernels.overwrite(words, patch.base, patch.word_positions, old, new)


def _holdings(
    schema: Schema, tensor: int, regions: list[Region], parameters: Mapping[str, Words]
) -> list[HeldRegion]:
    spec = schema.tensors[tensor]
    for region in regions:
        words = parameters.get(region.parameter)
        if words is None:
            raise ValueError(f"tensor {spec.name!r}: there is no parameter {region.parameter!r}")
        fault = region_problem(region, spec, words.size) or _unusable(words, word_type(spec.dtype))
        if fault:
            raise ValueError(f"tensor {spec.name!r} in {region.parameter!r}: {fault}")
    return held_regions(regions)


def _unusable(words: Words, word: np.dtype[np.unsignedinteger]) -> str:
    if words.dtype != word or words.ndim != 1:
        return f"{words.dtype} of {words.ndim} dimensions, not flat {word}"
    if not (words.flags.writeable and words.flags.c_contiguous and words.flags.aligned):
        return "not writable, contiguous and aligned"
    return ""

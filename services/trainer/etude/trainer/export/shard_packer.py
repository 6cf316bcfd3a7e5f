"""Packer of one rank's published parts, read from the live weights."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from etude.common.api.run.weights import Weights
from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.coding.container import Container
from etude.common.weights.protocol.manifest import Stats
from etude.common.weights.tensors import digest
from etude.common.weights.tensors.digest import ZERO, Digest
from etude.common.weights.tensors.schema import Schema
from etude.common.weights.tensors.tiles import tiling
from etude.common.weights.tensors.words import Words, lanes_per_element
from etude.trainer.export.change_tracker import Changes
from etude.trainer.export.delta_packer import Packer, Shard
from etude.trainer.export.shards import (
    LiveShard,
    ShardEdits,
    ShardPart,
    coverage,
    published_parts,
    published_runs,
    tile_positions,
)
from etude.trainer.model import checkpoint_layout, tensor_bits
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.parameters import gather_full, local_shard
from etude.trainer.model.policy import Policy


class PackedShard(NamedTuple):
    """A rank's part of a version, before its upload."""

    container: Container | None
    """None if nothing changed."""
    digests: list[Digest]
    """Of each part, after this version."""
    change: Digest
    """From the base to this version."""
    stats: Stats
    is_complete: bool


class ShardPacker:
    """The parts of the checkpoint's tensors that this rank publishes."""

    def __init__(self, policy: Policy, ranks: RankGroup, *, settings: Weights) -> None:
        self._policy = policy
        self._ranks = ranks
        self._settings = settings
        self._layout = checkpoint_layout.trace_layout(
            policy.model, dtype=settings.dtype, grid=settings.advanced.tile_grid
        )
        sources = checkpoint_layout.live_tensors(policy.model)
        parts = published_parts(self._layout, published_runs(sources, ranks))
        self._parts = sorted([*parts, *self._scattered_parts()]) if ranks.is_first else parts
        self.coverage = coverage(self._parts, self.schema, is_first_rank=ranks.is_first)
        """Proof, with that of the other ranks, that all parts make up the checkpoint."""
        trained = {name for name, _ in policy.model.named_parameters()}
        self._untracked = sources.keys() - trained
        self.sizes = {name: local_shard(tensor).numel() for name, tensor in sources.items()}
        """Elements of this rank's shard of each source."""

    @property
    def schema(self) -> Schema:
        return self._layout.schema

    def raw_bits(self, parameter: Tensor, *, copy: bool = False) -> Tensor:
        """Raw bits of this rank's shard of a parameter, in the published dtype. [n]."""
        shard = local_shard(parameter.detach())
        dtype = tensor_bits.wire_dtype(shard, dtype=self._settings.dtype)
        return tensor_bits.raw_bits(shard, dtype=dtype, copy=copy)

    def part_digests(self) -> list[Digest]:
        """Digest of each part in the current weights; collective."""
        reader = self._reader()
        return [self._digest(part, reader.read_words(part)) for part in self._parts]

    def pack(
        self, before: Sequence[Digest] | None, changes: Changes, *, codec: Codec
    ) -> PackedShard:
        """Pack the current weights; collective.

        Args:
            before: the digest of each part in the base; None packs everything.
            changes: since the base, by source.
            codec: of changes.
        """
        reader = self._reader()
        after: list[Digest] = []
        with Packer(self.schema, codec=codec) as packer:
            for place, part in enumerate(self._parts):
                if before is None:
                    after.append(self._add_complete(packer, part, reader))
                    continue
                edits = (
                    reader.live.changed_elements(part, changes) if self._is_tracked(part) else None
                )
                if edits is None:
                    after.append(self._add_replaced(packer, part, reader, before[place]))
                else:
                    change = self._add_changes(packer, part, reader, edits)
                    after.append(before[place].plus(change))
            packed = packer.finish()
        elements = sum(part.stop - part.start for part in self._parts)
        return PackedShard(
            packed.container if packed.container.blocks else None,
            after,
            packed.digest,
            Stats(**{**packed.stats._asdict(), "elements": elements}),
            is_complete=before is None,
        )

    def is_replaced(self, changes: Changes) -> bool:
        """True if every tracked part changed too much for a delta."""
        return all(
            changes.get(held.source, ()) is None
            for part in self._parts
            if self._is_tracked(part)
            for held in part.held
        )

    def _add_complete(self, packer: Packer, part: ShardPart, reader: "_Reader") -> Digest:
        words = reader.read_words(part)
        packer.add_complete(part.tensor, words, Shard(part.start, part.stop))
        return self._digest(part, words)

    def _add_replaced(
        self, packer: Packer, part: ShardPart, reader: "_Reader", before: Digest
    ) -> Digest:
        words = reader.read_words(part)
        after = self._digest(part, words)
        if after != before:
            packer.add_replaced(part.tensor, words, Shard(part.start, part.stop), before=before)
        return after

    def _add_changes(
        self, packer: Packer, part: ShardPart, reader: "_Reader", edits: ShardEdits
    ) -> Digest:
        if not edits.flat.size:
            return ZERO
        cut = tiling(self.schema.tensors[part.tensor], self.schema.grid)
        packer.add_changes(
            part.tensor,
            *edits,
            Shard(part.start, part.stop),
            block_words=lambda tile, lo, hi: reader.live.read_elements(
                part, tile_positions(cut, tile, lo, hi)
            ),
        )
        return digest.change(edits.old, edits.new, edits.flat, self.schema.offsets[part.tensor])

    def _digest(self, part: ShardPart, words: Words) -> Digest:
        spec = self.schema.tensors[part.tensor]
        lane = self.schema.offsets[part.tensor] + part.start * lanes_per_element(spec.dtype)
        return digest.scan(words, lane)

    def _is_tracked(self, part: ShardPart) -> bool:
        """True if changes of a part are listed; otherwise its digest is compared."""
        return bool(part.held) and not any(held.source in self._untracked for held in part.held)

    def _reader(self) -> "_Reader":
        sources = checkpoint_layout.live_tensors(self._policy.model)
        gathered: dict[str, Tensor] = {}
        for name in self._layout.scattered:
            value = gather_full(sources[name])
            if self._ranks.is_first:
                gathered[name] = value
        named = (
            checkpoint_layout.to_checkpoint_tensors(self._policy.model, gathered)
            if gathered
            else {}
        )
        dtype = tensor_bits.FLOATS[self._settings.dtype]
        scattered = {
            self.schema.index[name]: tensor_bits.to_words(value, dtype=dtype)
            for name, value in named.items()
        }
        return _Reader(LiveShard(sources, self._settings.dtype), scattered)

    def _scattered_parts(self) -> Iterable[ShardPart]:
        held = {piece.tensor for pieces in self._layout.pieces.values() for piece in pieces}
        for place, spec in enumerate(self.schema.tensors):
            if spec.name not in held:
                yield ShardPart(place, 0, spec.elements, ())


class _Reader(NamedTuple):
    """The weights as they are now."""

    live: LiveShard
    scattered: dict[int, Words]
    """Complete tensors that exist only after conversion."""

    def read_words(self, part: ShardPart) -> Words:
        return self.live.read_words(part) if part.held else self.scattered[part.tensor]

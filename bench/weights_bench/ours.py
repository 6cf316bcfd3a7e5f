"""Etude's own codecs: packer, container, checks, and live weights with their way back."""

from collections.abc import Sequence
from typing import NamedTuple, cast

from blake3 import blake3
from typing_extensions import override

from etude.common.errors import CorruptError
from etude.common.weights.coding.block_index import HASH_BYTES, BlockRow
from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.coding.container import Container, parse_index
from etude.common.weights.replicas.block_reader import VerifiedBlock, stage_block
from etude.common.weights.replicas.live_weights import LiveWeights, identity_regions
from etude.common.weights.replicas.patches import PreparedPatches
from etude.common.weights.replicas.staged_file import StagedBlock
from etude.common.weights.tensors.changes import changed_places
from etude.common.weights.tensors.digest import ZERO, Digest
from etude.common.weights.tensors.schema import Schema
from etude.common.weights.tensors.tiles import tiling
from etude.common.weights.tensors.words import Words
from etude.trainer.export.delta_packer import Packer, Shard, shard_words
from weights_bench.contender import Contender, Receiver, Sent, copies, overwrite
from weights_bench.trajectory import Trajectory


class _Message(NamedTuple):
    """What the manifest would say, and its one object."""

    container: Container
    digest: Digest
    is_complete: bool
    """Whether the digest is of the new state, not of the change."""


class Ours(Contender):
    """Blocks of one codec, dense where that is smaller."""

    standing_at_sender = 0.0
    """Changes are found while the optimiser steps: no copy of the weights is kept."""

    def __init__(self, name: str, codec: Codec) -> None:
        self.name = name
        self._codec = codec

    @override
    def send(self, trajectory: Trajectory) -> Sent:
        schema = trajectory.schema
        with Packer(schema, codec=self._codec, threads=1) as packer:
            for tensor, spec in enumerate(schema.tensors):
                old, new = trajectory.old[tensor], trajectory.new[tensor]
                shard = Shard(0, spec.elements)
                if self._codec is Codec.DENSE:
                    packer.add_complete(tensor, new, shard)
                    continue
                flat = changed_places(old, new)
                blocks = shard_words(new, shard, tiling(spec, schema.grid))
                packer.add_changes(tensor, flat, old[flat], new[flat], shard, block_words=blocks)
            packed = packer.finish()
        found = packed.container
        message = _Message(found, packed.digest, self._codec is Codec.DENSE)
        return Sent(message, found.index_offset, found.size - found.index_offset)

    @override
    def receiver(self, trajectory: Trajectory) -> "OurReceiver":
        return OurReceiver(trajectory)


class OurReceiver(Receiver):
    """Checks every hash and the state digest before it writes; keeps nothing between versions."""

    standing_bytes = 0

    def __init__(self, trajectory: Trajectory) -> None:
        self._old = trajectory.old
        self._schema = trajectory.schema
        self._words = copies(trajectory.old)
        specs = trajectory.schema.tensors
        named = {spec.name: words for spec, words in zip(specs, self._words, strict=True)}
        self._live = LiveWeights(self._schema, named, identity_regions(self._schema))
        self._state = self._live.scan()

    @override
    def reset(self) -> None:
        overwrite(self._words, self._old)

    @override
    def stage(self, sent: Sent) -> PreparedPatches:
        return self.prepared(self.decoded(sent), sent)

    @override
    def commit(self, staged: object) -> None:
        if not self._live.write(cast("PreparedPatches", staged)):
            raise CorruptError("a weight was neither the old one nor the new one")

    @override
    def live(self) -> tuple[Words, ...]:
        return self._words

    def decoded(self, sent: Sent) -> list[StagedBlock]:
        """Every block, its hash checked first.

        Raises:
            CorruptError: a hash does not match.
        """
        made = cast("_Message", sent.body).container
        data = memoryview(made.data)
        index = parse_index(
            bytes(data[made.index_offset : made.index_offset + made.index_length]),
            schema=self._schema,
            size=made.size,
            index_offset=made.index_offset,
            sha256=made.index_sha256,
            where="bench",
        )
        return [
            _staged(self._schema, row, data[row.offset : row.offset + row.length]) for row in index
        ]

    def prepared(self, blocks: Sequence[StagedBlock], sent: Sent) -> PreparedPatches:
        """What the version changes, with the digest that the sender foretold.

        Raises:
            CorruptError: the digest is another.
        """
        found = self._live.prepare(blocks)
        message = cast("_Message", sent.body)
        known = self._state if message.is_complete else ZERO
        if known.plus(found.digest) != message.digest:
            raise CorruptError("the change does not lead to the state that was published")
        return found

    def undo(self, prepared: PreparedPatches) -> None:
        """Return to the old version by the record of it."""
        self._live.undo(prepared)


def _staged(schema: Schema, row: BlockRow, payload: memoryview) -> StagedBlock:
    if blake3(payload).digest(HASH_BYTES) != row.blake3:
        raise CorruptError("bench: content does not match its BLAKE3 digest")
    return stage_block(VerifiedBlock(row, payload), schema, where="bench")


L1 = Ours("L1", Codec.L1)
CODECS = (
    L1,
    Ours("L2", Codec.L2),
    Ours("L2r", Codec.L2R),
    Ours("dense deltas", Codec.DENSE_DELTA),
    Ours("dense planes", Codec.DENSE),
)

"""Indexes of a saved state: the shards that ranks stored, and the digests of their bytes."""

import itertools
import math
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BaseModel, Field, JsonValue, ValidationError, model_validator
from torch import Tensor

from etude.common.blobs import MissingError, Store
from etude.common.errors import CorruptError
from etude.common.weights.protocol import records
from etude.common.weights.tensors import safetensors
from etude.common.weights.tensors.safetensors import ITEM_BYTES, MAX_DIMS, MAX_NAME_CHARS
from etude.trainer.model import tensor_bits
from etude.trainer.model.shard_runs import Interval

MAX_RANKS = 1 << 16

MAX_BLOCK_BYTES = 16 << 20
"""Largest block, which a reader has in memory as a whole."""

_FORMAT_1_INDEX = "index.json"

Blake3 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class StoredShard(BaseModel):
    """The part of a tensor that a rank stored: the product of index intervals of each dimension."""

    model_config = records.STRICT

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    dtype: Literal["F32", "BF16", "U8", "I64"]
    shape: tuple[int, ...] = Field(max_length=MAX_DIMS)
    """Of the complete tensor."""
    intervals: tuple[tuple[Interval, ...], ...]
    """First index and end of each, increasing, by dimension."""
    offset: int = Field(ge=0)
    """First byte in the rank's stream."""

    @model_validator(mode="after")
    def _check_intervals(self) -> Self:
        """Refuse intervals that are not of the shape.

        Raises:
            ValueError: they are not.
        """
        if len(self.intervals) != len(self.shape):
            raise ValueError(f"{self.name}: intervals of {len(self.intervals)} dimensions")
        for size, intervals in zip(self.shape, self.intervals, strict=True):
            bounds = [0, *itertools.chain(*intervals), size]
            is_sorted = all(low <= high for low, high in itertools.pairwise(bounds))
            if not is_sorted or any(start == end for start, end in intervals):
                raise ValueError(f"{self.name}: {intervals} are no intervals of {size} indices")
        return self

    @property
    def num_bytes(self) -> int:
        held = (sum(end - start for start, end in each) for each in self.intervals)
        return math.prod(held) * ITEM_BYTES[self.dtype]


class RankIndex(BaseModel):
    """Index of the stream of one rank."""

    model_config = records.STRICT

    format: Literal[2] = 2
    rank: int = Field(ge=0, lt=MAX_RANKS)
    ranks: int = Field(ge=1, le=MAX_RANKS)
    """Ranks that stored the state together."""
    size: int = Field(ge=0)
    """Bytes of the stream."""
    part_bytes: int = Field(ge=1)
    """Bytes of each of its objects but the last."""
    block_bytes: int = Field(ge=1, le=MAX_BLOCK_BYTES)
    """Bytes of each block but the last of an object."""
    digests: tuple[Blake3, ...]
    """Of each block of the stream."""
    shards: tuple[StoredShard, ...]
    state: dict[str, JsonValue]
    """What is no tensor; equal in the indexes of all ranks."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        """Refuse an index whose numbers contradict each other.

        Raises:
            ValueError: they do.
        """
        if self.part_bytes % self.block_bytes:
            raise ValueError("a part is no number of blocks")
        if len(self.digests) != -(-self.size // self.block_bytes):
            raise ValueError(f"{len(self.digests)} digests of {self.size} bytes")
        ends = [0, *(each.offset + each.num_bytes for each in self.shards)]
        starts = [*(each.offset for each in self.shards), self.size]
        if any(end > start for end, start in zip(ends, starts, strict=True)):
            raise ValueError("shards overlap, or end behind the stream")
        return self


class ShardStream(NamedTuple):
    """Bytes that a rank stored, in objects of equal size but the last."""

    keys: tuple[str, ...]
    size: int
    part_bytes: int
    block_bytes: int
    """Above MAX_BLOCK_BYTES only for one object under one digest."""
    digests: tuple[str, ...]
    shards: tuple[StoredShard, ...]


class SavedState(NamedTuple):
    """A state in the store; none of its tensors has been read."""

    streams: list[ShardStream]
    state: dict[str, JsonValue]


def part_key(prefix: str, rank: int, part: int) -> str:
    """Key of an object of a rank's stream."""
    return f"{prefix}/{rank:05d}-{part:05d}.bin"


def index_key(prefix: str, rank: int) -> str:
    """Key of a rank's index."""
    return f"{prefix}/{rank:05d}.json"


def read_indexes(store: Store, prefix: str) -> SavedState:
    """Read what was saved below prefix, by this release or by one that wrote complete tensors.

    Raises:
        CorruptError: an index is missing or damaged, or contradicts another; it is named.
        StoreError: the store failed.
    """
    if store.head(f"{prefix}/{_FORMAT_1_INDEX}") is not None:
        return _read_format_1(store, prefix)
    first = _read_index(store, prefix, 0)
    indexes = [first, *(_read_index(store, prefix, rank) for rank in range(1, first.ranks))]
    for rank, index in enumerate(indexes):
        if (index.rank, index.ranks, index.state) != (rank, first.ranks, first.state):
            where = f"{store.url}/{index_key(prefix, rank)}"
            raise CorruptError(f"{where}: is of another state than the index of rank 0")
    return SavedState([_stream(prefix, index) for index in indexes], first.state)


def check_fit(saved: SavedState, expected: Mapping[str, Tensor], *, where: str) -> None:
    """Refuse tensors of another model before any of them is read.

    Raises:
        CorruptError: a tensor is missing, left over or of another shape.
    """
    shards = {each.name: each for stream in saved.streams for each in stream.shards}
    for name in sorted(shards.keys() ^ expected.keys()):
        raise CorruptError(
            f"{where}: tensor {name!r} is {'missing' if name in expected else 'not of this model'}"
        )
    for stream in saved.streams:
        for shard in stream.shards:
            tensor, dtype = expected[shard.name], tensor_bits.DTYPES[shard.dtype]
            if shard.shape != tuple(tensor.shape) or dtype != tensor.dtype:
                raise CorruptError(
                    f"{where}: tensor {shard.name!r} is {dtype}{list(shard.shape)},"
                    f" the model has {tensor.dtype}{list(tensor.shape)}"
                )


def _read_index(store: Store, prefix: str, rank: int) -> RankIndex:
    key = index_key(prefix, rank)
    return records.parse(RankIndex, _fetch(store, key), where=f"{store.url}/{key}")


def _fetch(store: Store, key: str) -> bytes:
    try:
        return records.fetch(store, key)
    except MissingError as cause:
        raise CorruptError(f"{store.url}/{key}: missing") from cause


def _stream(prefix: str, index: RankIndex) -> ShardStream:
    parts = -(-index.size // index.part_bytes)
    return ShardStream(
        keys=tuple(part_key(prefix, index.rank, part) for part in range(parts)),
        size=index.size,
        part_bytes=index.part_bytes,
        block_bytes=index.block_bytes,
        digests=index.digests,
        shards=index.shards,
    )


class _Format1Part(BaseModel):
    model_config = records.STRICT

    name: str = Field(pattern=r"^[0-9]{4}-[0-9a-f]{16}\.safetensors$")
    size: int = Field(ge=8)
    blake3: Blake3


class _Format1Index(BaseModel):
    model_config = records.STRICT

    format: Literal[1]
    parts: tuple[_Format1Part, ...] = Field(min_length=1)
    tensors: int = Field(ge=1)
    state: dict[str, JsonValue]


def _read_format_1(store: Store, prefix: str) -> SavedState:
    """Read the index of complete tensors in safetensors files: each is a stream of one block.

    Raises:
        CorruptError: the index or a file's header is damaged.
    """
    key = f"{prefix}/{_FORMAT_1_INDEX}"
    index = records.parse(_Format1Index, _fetch(store, key), where=f"{store.url}/{key}")
    streams = [_format_1_stream(store, f"{prefix}/{part.name}", part) for part in index.parts]
    count = sum(len(stream.shards) for stream in streams)
    if count != index.tensors or len({part.name for part in index.parts}) != len(index.parts):
        raise CorruptError(f"{store.url}/{prefix}: {count} tensors, not {index.tensors}")
    return SavedState(streams, index.state)


def _format_1_stream(store: Store, key: str, part: _Format1Part) -> ShardStream:
    where = f"{store.url}/{key}"
    info = store.head(key)
    if info is None or info.size != part.size:
        found = "missing" if info is None else f"{info.size} bytes, the index says {part.size}"
        raise CorruptError(f"{where}: {found}")
    size = safetensors.header_bytes(store.get_range(key, 0, 8), where=where)
    header = store.get_range(key, 0, min(size, part.size))
    try:
        shards = tuple(
            StoredShard(
                name=each.name,
                dtype=each.dtype,  # type: ignore[arg-type]  # pydantic refuses others
                shape=each.shape,
                intervals=tuple(((0, length),) for length in each.shape),
                offset=each.start,
            )
            for each in safetensors.list_tensors(header, part.size, where=where)
        )
    except ValidationError as cause:
        raise CorruptError(f"{where}: {cause}") from cause
    return ShardStream((key,), part.size, part.size, part.size, (part.blake3,), shards)

"""Schema of a policy's tensors, in the coordinates of its Hugging Face checkpoint.

Every element of the model has one place: tensor, then row-major position. The state digest, the
tiles, the blocks and the maps of trainers and engines all refer to it.
"""

import hashlib
import json
import math
from functools import cached_property
from itertools import accumulate
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from etude.common.errors import CorruptError
from etude.common.weights.protocol import records
from etude.common.weights.tensors.safetensors import ITEM_BYTES, MAX_DIMS, MAX_NAME_CHARS
from etude.common.weights.tensors.words import ORDERED, lanes_per_element

Split = Literal["rows", "columns"]
Grid = Literal[1, 2, 4, 8, 16]

MAX_TENSORS = 1 << 20
_COLUMN_SPLIT = ("o_proj.weight", "down_proj.weight", "out_proj.weight", "w2.weight")
"""Tensors that tensor-parallel inference cuts along their second dimension."""


class TensorSpec(BaseModel):
    """One tensor of the checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    dtype: str
    """A key of ITEM_BYTES: the format that is live at inference."""
    shape: tuple[int, ...] = Field(max_length=MAX_DIMS)
    split: Split
    """Along which dimension tensor-parallel ranks cut it."""

    @field_validator("dtype")
    @classmethod
    def _check_dtype(cls, dtype: str) -> str:
        if dtype not in ITEM_BYTES:
            raise ValueError(f"unknown dtype {dtype!r}")
        return dtype

    @field_validator("shape")
    @classmethod
    def _check_shape(cls, shape: tuple[int, ...]) -> tuple[int, ...]:
        if any(size < 0 for size in shape) or math.prod(shape) >= 1 << 48:
            raise ValueError(f"{shape} is no shape of a tensor")
        return shape

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]

    @property
    def lanes(self) -> int:
        """Lanes of the state digest that it takes."""
        return self.elements * lanes_per_element(self.dtype)

    @property
    def is_ordered(self) -> bool:
        """True if changes are differences on the ulp axis, not plain differences of codes."""
        return self.dtype in ORDERED


class Schema(BaseModel):
    """All tensors of a policy, each once, tied ones under one name, sorted by name."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    grid: Grid
    """Largest tensor-parallel degree whose ranks can read only their own slice."""
    tensors: tuple[TensorSpec, ...] = Field(min_length=1, max_length=MAX_TENSORS)

    @model_validator(mode="after")
    def _sorted(self) -> "Schema":
        names = [spec.name for spec in self.tensors]
        if names != sorted(set(names)):
            raise ValueError("tensors are not sorted by name, each once")
        return self

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First lane of each tensor in the state digest, then the number of all lanes."""
        return tuple(accumulate((spec.lanes for spec in self.tensors), initial=0))

    @cached_property
    def index(self) -> dict[str, int]:
        return {spec.name: place for place, spec in enumerate(self.tensors)}

    @property
    def lanes(self) -> int:
        return self.offsets[-1]

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.tensors)

    @cached_property
    def sha256(self) -> str:
        """Its name in the store: hexadecimal SHA-256 of to_bytes()."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """The schema as it is stored; equal schemas give equal bytes."""
        return records.to_bytes(self)


def split_of(name: str) -> Split:
    """Dimension along which tensor-parallel ranks cut a tensor of this name."""
    return "columns" if name.endswith(_COLUMN_SPLIT) else "rows"


def parse_schema(data: bytes, *, sha256: str, where: str) -> Schema:
    """The schema of this very digest.

    Raises:
        CorruptError: damaged, or not what the digest names.
    """
    if hashlib.sha256(data).hexdigest() != sha256:
        raise CorruptError(f"{where}: content does not match its SHA-256 digest")
    try:
        # Strict models take tuples from JSON text only.
        return Schema.model_validate_json(json.dumps(records.unseal(data, where=where)))
    except ValidationError as cause:
        raise CorruptError(f"{where}: {cause}") from cause


def difference(old: Schema, new: Schema) -> str:
    """The first thing in which two schemas differ, for people; empty if nothing."""
    if old.grid != new.grid:
        return f"tile grid {old.grid} became {new.grid}"
    before = {spec.name: spec for spec in old.tensors}
    after = {spec.name: spec for spec in new.tensors}
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name), after.get(name)
        if was is None or now is None:
            return f"tensor {name!r} {'appeared' if was is None else 'is gone'}"
        if was != now:
            return (
                f"tensor {name!r} was {was.dtype}{list(was.shape)}, is {now.dtype}{list(now.shape)}"
            )
    return ""

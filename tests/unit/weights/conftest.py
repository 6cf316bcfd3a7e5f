"""A store, small versions, and a publisher."""

import struct
from collections.abc import Callable

import pytest

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.weights import FullManifest, Tensor, VersionId

Publish = Callable[..., FullManifest]


def small_tensors(value: float) -> list[Tensor]:
    """Three formats, an odd size, and a tensor without elements."""
    return [
        Tensor(name="norm", dtype="BF16", shape=(3,), data=struct.pack("<3e", *[value] * 3)),
        Tensor(name="embed", dtype="F32", shape=(2, 3), data=struct.pack("<6f", *[value] * 6)),
        Tensor(name="mask", dtype="U8", shape=(5,), data=bytes([int(value) % 256] * 5)),
        Tensor(name="nothing", dtype="F32", shape=(0, 4), data=b""),
    ]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def tensors() -> Callable[[float], list[Tensor]]:
    return small_tensors


@pytest.fixture
def publish(store: MemoryStore) -> Publish:
    """Publishes one small version whose content depends on its number alone, unless told."""

    def make(epoch: int, number: int, value: float | None = None) -> FullManifest:
        return weights.publish(
            store,
            run="run-1",
            version=VersionId(epoch, number),
            step=number,
            holder="trainer-0",
            tensors=small_tensors(float(number) if value is None else value),
        )

    return make


@pytest.fixture
def claim(store: MemoryStore) -> Callable[..., int]:
    def make(parent: VersionId | None = None, reason: str = "start") -> int:
        return weights.claim_epoch(store, holder="trainer-0", parent=parent, reason=reason)

    return make

"""Where a rank of the chaos engine keeps what: fused, tied and sliced, as engines do."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tests.harness.chaos.model import TENSORS, Bits, Tensor

from etude.common.weights.replicas.regions import Region, slice_regions
from etude.common.weights.tensors.schema import Schema

FUSED = ("layers.0.q_proj.weight", "layers.0.k_proj.weight", "layers.0.v_proj.weight")
QKV = "layers.0.qkv"
"""One parameter for three tensors."""
TIED, HEAD = "embed.weight", "lm_head.weight"
"""One tensor in two parameters."""

_WORDS: dict[str, np.dtype[np.unsignedinteger]] = {
    "F32": np.dtype("<u4"),
    "BF16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "F8_E4M3": np.dtype("u1"),
}

Word = npt.NDArray[np.unsignedinteger]


def regions(schema: Schema, rank: int, ranks: int) -> dict[int, list[Region]]:
    """The map from the checkpoint to one rank's parameters."""
    found = slice_regions(schema, rank, ranks)
    start = 0
    for name in FUSED:
        [region] = found[schema.index[name]]
        found[schema.index[name]] = [
            region._replace(parameter=QKV, parameter_offset=region.parameter_offset + start)
        ]
        start += region.elements
    [embedding] = found[schema.index[TIED]]
    found[schema.index[TIED]] = [embedding, embedding._replace(parameter=HEAD)]
    return found


def file_of(folder: Path, rank: int, parameter: str) -> Path:
    """The words of one parameter of one rank."""
    return folder / f"{rank}-{parameter}"


class MixedRanksError(Exception):
    """Copies of the same words differ."""


def assembled(folder: Path, ranks: int) -> Bits:
    """All words in checkpoint order, straight from the ranks' files.

    Raises:
        MixedRanksError: two copies of the same words differ.
    """
    found: Bits = {}
    for name, tensor in TENSORS.items():
        parts = [part for rank in range(ranks) for part in _parts(folder, rank, ranks, name)]
        if _is_cut(tensor, ranks):
            copies = [parts[0::2], parts[1::2]] if name == TIED else [parts]
            axis = -1 if tensor.split == "columns" else -2
            parts = [np.concatenate(copy, axis=axis) for copy in copies]
        if any(not np.array_equal(parts[0], part) for part in parts[1:]):
            raise MixedRanksError(name)
        found[name] = parts[0].reshape(-1)
    return found


def _is_cut(tensor: Tensor, ranks: int) -> bool:
    if len(tensor.shape) < 2:
        return False
    return tensor.shape[-1 if tensor.split == "columns" else -2] % ranks == 0


def _parts(folder: Path, rank: int, ranks: int, name: str) -> Iterator[Word]:
    """The copies of a tensor, or of its slice, that a rank holds."""
    shape = list(TENSORS[name].shape)
    if _is_cut(TENSORS[name], ranks):
        shape[-1 if TENSORS[name].split == "columns" else -2] //= ranks
    word = _WORDS[TENSORS[name].dtype]
    start, file = 0, name
    if name in FUSED:
        file = QKV
        rows = sum(TENSORS[each].shape[0] for each in FUSED[: FUSED.index(name)])
        start = rows // ranks * TENSORS[name].shape[1]
    for each in (file, HEAD) if name == TIED else (file,):
        words = np.fromfile(file_of(folder, rank, each), word)
        yield words[start : start + int(np.prod(shape))].reshape(shape)

"""Weights of a trained encoder in whole numbers, and their file."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self, TypeVar
from zipfile import BadZipFile

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from etude.agent.search.embedders.interface import MAX_COMPONENTS, Bytes, quantise
from etude.agent.search.embedders.word_rows import MAX_WORDS
from etude.common.errors import CorruptError

MAX_FILE_BYTES = 64 << 20
HEADS = 4
_MAX_LAYERS = 8
_MAX_SCALE = 4095
_KINDS = 2
_LINEARS = ("attention", "output", "inner", "outer")

Floats = NDArray[np.float32]
Number = TypeVar("Number", bound=np.generic)
Arrays = Mapping[str, NDArray[np.generic]]


class Linear(NamedTuple):
    """Linear map with one scale for each output."""

    weights: Bytes
    """[M, K]."""
    scales: Floats
    """[M]."""
    bias: Floats
    """[M]."""

    @classmethod
    def quantise(cls, weights: Floats, bias: Floats) -> Self:
        """The nearest map with weights of int8."""
        scales = (np.abs(weights).max(axis=1) / 127).astype(np.float32)
        return cls(quantise(weights.astype(np.float64)), scales, bias.astype(np.float32))


class Layer(NamedTuple):
    """Attention and the two maps after it."""

    attention: Linear
    """Queries, keys and values.  [3 C, C]."""
    output: Linear
    """[C, C]."""
    inner: Linear
    """[F, C]."""
    outer: Linear
    """[C, F]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderWeights:
    """All that an encoder has learned."""

    words: Sequence[str]
    rows: Bytes
    """Directions of words.  [V, C]."""
    scales: NDArray[np.uint16]
    """Length of each direction, in units.  [V]."""
    unit: Floats
    """[1]."""
    places: Floats
    """Added where a layer reads, by the place of a word.  [MAX_WORDS, C]."""
    kinds: Floats
    """Added likewise, for code and for questions.  [2, C]."""
    gate: Linear
    """Weight of each word in the sum.  [1, C]."""
    layers: Sequence[Layer]

    @property
    def num_components(self) -> int:
        """Length of the vectors."""
        return int(self.rows.shape[1])

    @property
    def digest(self) -> str:
        """BLAKE3 of all arrays with their names and shapes."""
        seen = blake3()
        for name, array in self.arrays().items():
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            seen.update(f"{name} {array.shape} {array.dtype.name}\n".encode())
            seen.update(np.ascontiguousarray(little).tobytes())
        return seen.hexdigest()

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """The arrays of a file."""
        found: dict[str, NDArray[np.generic]] = {
            "words": np.frombuffer("\n".join(self.words).encode(), np.uint8),
            "rows": self.rows,
            "scales": self.scales,
            "unit": self.unit,
            "places": self.places,
            "kinds": self.kinds,
        }
        for name, linear in self._linears():
            found |= {f"{name}.{part}": array for part, array in linear._asdict().items()}
        return found

    def _linears(self) -> Iterator[tuple[str, Linear]]:
        yield "gate", self.gate
        for index, layer in enumerate(self.layers):
            yield from ((f"{index}.{name}", linear) for name, linear in layer._asdict().items())

    def save(self, path: Path) -> None:
        """Write the file, the same bytes for the same weights."""
        with path.open("wb") as file:
            np.savez(file, **self.arrays())  # type: ignore[arg-type] # no name is allow_pickle


def quantise_rows(rows: Floats) -> tuple[Bytes, NDArray[np.uint16], Floats]:
    """Directions, their lengths in units, and the unit."""
    largest = np.abs(rows).max(axis=1)
    unit = max(float(largest.max()), 1e-6) / _MAX_SCALE
    scales = np.rint(largest / unit).astype(np.uint16)
    return quantise(rows.astype(np.float64)), scales, np.array([unit / 127], np.float32)


def load_weights(path: Path) -> EncoderWeights:
    """Load the weights from a file that `save` wrote.

    Raises:
        CorruptError: the file is not one.
    """
    if path.stat().st_size > MAX_FILE_BYTES:
        raise CorruptError(f"{path} is larger than any encoder")
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as found:
            loaded = _weights({name: found[name] for name in found.files})
    except (ValueError, KeyError, OSError, EOFError, BadZipFile) as error:
        raise CorruptError(f"{path} is not an encoder: {error}") from error
    wrong = next(_misfits(loaded), None)
    if wrong:
        raise CorruptError(f"{path} is not an encoder: {wrong} does not fit the others")
    return loaded


def _weights(arrays: Arrays) -> EncoderWeights:
    def linear(name: str) -> Linear:
        parts = [arrays[f"{name}.{part}"] for part in ("weights", "scales", "bias")]
        return Linear(_typed(parts[0], np.int8), *(_typed(p, np.float32) for p in parts[1:]))

    num_layers = sum(name.endswith(".inner.bias") for name in arrays)
    if num_layers > _MAX_LAYERS:
        raise ValueError(f"{num_layers} layers, more than {_MAX_LAYERS}")
    return EncoderWeights(
        words=_typed(arrays["words"], np.uint8).tobytes().decode("ascii", "replace").split("\n"),
        rows=_typed(arrays["rows"], np.int8),
        scales=_typed(arrays["scales"], np.uint16),
        unit=_typed(arrays["unit"], np.float32),
        places=_typed(arrays["places"], np.float32),
        kinds=_typed(arrays["kinds"], np.float32),
        gate=linear("gate"),
        layers=[Layer(*(linear(f"{n}.{name}") for name in _LINEARS)) for n in range(num_layers)],
    )


def _typed(array: NDArray[np.generic], wanted: type[Number]) -> NDArray[Number]:
    if array.dtype != wanted:
        raise ValueError(f"an array has type {array.dtype}, not {wanted.__name__}")
    return array.astype(wanted, copy=False)


def _misfits(found: EncoderWeights) -> Iterator[str]:
    """Names of arrays whose shape or numbers cannot be right."""
    if found.rows.ndim != 2 or not 0 < found.rows.shape[1] <= MAX_COMPONENTS:
        yield "rows"
        return
    size = found.num_components
    shapes = {
        "rows": (len(found.words), size),
        "scales": (len(found.words),),
        "unit": (1,),
        "places": (MAX_WORDS, size),
        "kinds": (_KINDS, size),
        **_linear_shapes("gate", 1, size),
    }
    for index, layer in enumerate(found.layers):
        inner = len(layer.inner.bias)
        if size % HEADS or inner > MAX_COMPONENTS:
            yield f"{index}.inner.bias"
        shapes |= _linear_shapes(f"{index}.attention", 3 * size, size)
        shapes |= _linear_shapes(f"{index}.output", size, size)
        shapes |= _linear_shapes(f"{index}.inner", inner, size)
        shapes |= _linear_shapes(f"{index}.outer", size, inner)
    for name, array in found.arrays().items():
        is_finite = array.dtype != np.float32 or bool(np.isfinite(array.astype(np.float32)).all())
        if name != "words" and (array.shape != shapes[name] or not is_finite):
            yield name


def _linear_shapes(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.weights": (outputs, inputs),
        f"{name}.scales": (outputs,),
        f"{name}.bias": (outputs,),
    }

"""Weight map: from a checkpoint's elements to the parameters of a loaded model.

Engines fuse, cut, pad and share the tensors of a checkpoint, each model in its own loader. The
map is not written down per model but measured: tensors whose bits are their elements' numbers go
through the model's own loader, and the parameters then show where each number went. A number that
comes back changed was computed, and has no place in the map.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from typing_extensions import override

from etude.common.errors import CorruptError
from etude.common.weights.replicas.regions import Region
from etude.common.weights.tensors.schema import Schema
from etude.common.weights.tensors.words import Words
from etude.inference.worker import element_codes
from etude.inference.worker.coverage import ComputedParameterError
from etude.inference.worker.rectangles import rectangles
from etude.inference.worker.tensors import DTYPES, NAMES, as_flat, as_tensor, as_words

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""A model's own loader of (name, tensor) pairs of a checkpoint, or of any part of it."""

BATCH_ELEMENTS = 1 << 25
"""Parameters read back at a time: their readers take some 20 bytes for each element."""


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Position of each tensor of the checkpoint in the parameters."""

    tensors: Mapping[str, torch.Tensor]
    """The elements of each parameter, in the order in which they lie in memory."""
    regions: Mapping[int, Sequence[Region]]
    """By the tensor's schema index; a rank that holds a slice lacks elements."""

    @property
    def parameters(self) -> dict[str, Words]:
        """The live words of parameters in host memory.

        Raises:
            ValueError: one is on a device.
        """
        return {name: as_words(flat) for name, flat in self.tensors.items()}


@torch.no_grad()
def build_weight_map(model: torch.nn.Module, load: Load, schema: Schema) -> WeightMap:
    """Build the map of a model; its floating-point parameters are overwritten.

    Raises:
        CorruptError: the schema does not describe this model: a tensor does not fit it, or a part
            of it is filled by no tensor.
        ComputedParameterError: a part of it is filled by a computation on tensors.
    """
    return _MapBuilder(model, load, schema).build()


class _HostWords(Mapping[str, Words]):
    """Words of every parameter; those on a device are fetched at each access."""

    def __init__(self, flat: Mapping[str, torch.Tensor]) -> None:
        self.flat = flat

    @override
    def __getitem__(self, name: str) -> Words:
        return as_words(self.flat[name].cpu())

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self.flat)

    @override
    def __len__(self) -> int:
        return len(self.flat)


class _MapBuilder:
    def __init__(self, model: torch.nn.Module, load: Load, schema: Schema) -> None:
        _check_formats(schema)
        self._load = load
        self._schema = schema
        self._starts = _starts(schema)
        live = {n: p for n, p in _whole_parameters(model) if p.dtype in NAMES and p.numel()}
        self._words = _HostWords({name: as_flat(parameter) for name, parameter in live.items()})
        self._formats = {name: NAMES[parameter.dtype] for name, parameter in live.items()}
        self._floating = {name for name, p in live.items() if p.is_floating_point()}

    def build(self) -> WeightMap:
        for name in self._floating:
            self._words.flat[name].view(torch.uint8).fill_(element_codes.BLANK_BYTE)
        sources = self._sources()
        regions: dict[int, list[Region]] = {}
        for batch in _batches(self._words.flat):
            for name, numbers in self._numbers(batch, sources).items():
                self._check_filled(name, numbers)
                for tensor, region in self._regions(name, numbers):
                    regions.setdefault(tensor, []).append(region)
        mapped = {region.parameter for found in regions.values() for region in found}
        return WeightMap({n: flat for n, flat in self._words.flat.items() if n in mapped}, regions)

    def _sources(self) -> dict[str, list[int]]:
        """Tensors that each parameter may hold elements of."""
        formats = {spec.dtype for spec in self._schema.tensors}
        places = range(len(self._schema.tensors))
        numbers = np.arange(len(places), dtype=np.int64)
        loads = element_codes.num_loads(formats, len(places))
        sources = {name: list(places) for name in self._words}
        for load in range(loads):
            self._write(places, lambda place: numbers[place : place + 1], load, loads)
            for name, words in self._words.items():
                format_ = self._formats[name]
                seen = element_codes.digits_present(words, format_)
                expected = element_codes.digits(numbers, format_, load, loads)
                sources[name] = [place for place in sources[name] if seen[expected[place]]]
        # A parameter without a trace of any tensor was computed: the numbers show it.
        return {n: found or self._all_if_touched(n) for n, found in sources.items()}

    def _all_if_touched(self, name: str) -> list[int]:
        blank = self._words[name].view(np.uint8) == element_codes.BLANK_BYTE
        return [] if blank.all() else list(range(len(self._schema.tensors)))

    def _numbers(
        self, batch: list[str], sources: Mapping[str, Sequence[int]]
    ) -> dict[str, element_codes.Numbers]:
        """Source of each element of some parameters."""
        places = sorted({place for name in batch for place in sources[name]})
        formats = {self._schema.tensors[place].dtype for place in places}
        loads = element_codes.num_loads(formats, int(self._starts[-1]))
        readers = {
            name: element_codes.DigitReader(
                self._formats[name], self._words.flat[name].numel(), loads
            )
            for name in batch
        }
        for load in range(loads):
            self._write(places, self._elements, load, loads)
            for name, reader in readers.items():
                reader.read(self._words[name], load)
        return {name: reader.numbers() for name, reader in readers.items()}

    def _elements(self, place: int) -> element_codes.Numbers:
        return np.arange(self._starts[place], self._starts[place + 1] - 1, dtype=np.int64)

    def _write(
        self,
        places: Iterable[int],
        numbers_of: Callable[[int], element_codes.Numbers],
        load: int,
        loads: int,
    ) -> None:
        """Send one digit of each element's number through the loader.

        Raises:
            CorruptError: the loader refuses a tensor of the schema.
        """

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for place in places:
                spec = self._schema.tensors[place]
                words = element_codes.encode_digits(numbers_of(place), spec.dtype, load, loads)
                whole = words if words.size == spec.elements else words.repeat(spec.elements)
                yield spec.name, as_tensor(whole, spec.dtype, spec.shape)

        try:
            self._load(tensors())
        except (AssertionError, IndexError, KeyError, RuntimeError, ValueError) as cause:
            raise CorruptError(f"the tensors do not fit the model: {cause!r}") from cause

    def _check_filled(self, name: str, numbers: element_codes.Numbers) -> None:
        computed = numbers == element_codes.UNKNOWN
        if computed.any():
            raise ComputedParameterError(
                f"parameter {name!r} is {self._formats[name]} and holds numbers that its loader "
                "converted or computed from the version's tensors; spec.weights.dtype sets the "
                "format of versions and of engines"
            )
        words = self._words[name]
        blank = np.frombuffer(bytes([element_codes.BLANK_BYTE]) * words.itemsize, words.dtype)[0]
        if (
            name in self._floating
            and ((words == blank) & (numbers == element_codes.CONSTANT)).any()
        ):
            raise CorruptError(f"the version leaves parameter {name!r} unfilled")

    def _regions(self, name: str, numbers: element_codes.Numbers) -> Iterator[tuple[int, Region]]:
        for found in rectangles(numbers, self._starts):
            tensor = int(np.searchsorted(self._starts, found.source_offset, side="right")) - 1
            yield (
                tensor,
                Region(
                    parameter=name,
                    parameter_offset=found.parameter_offset,
                    source_offset=found.source_offset - int(self._starts[tensor]),
                    rows=found.rows,
                    width=found.width,
                    parameter_stride=found.parameter_stride,
                    source_stride=found.source_stride,
                ),
            )


def _whole_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters that are no parts of others: what is written into these is written into parts.

    Latent attention has such parts: its absorbed projections are views of the one before them.
    """
    named = dict(model.named_parameters())
    sizes = {name: each.numel() * each.element_size() for name, each in named.items()}
    stored = {name: each.untyped_storage() for name, each in named.items()}
    whole = {stored[name].data_ptr() for name in named if sizes[name] == stored[name].nbytes()}
    for name, parameter in named.items():
        if sizes[name] == stored[name].nbytes() or stored[name].data_ptr() not in whole:
            yield name, parameter


def _check_formats(schema: Schema) -> None:
    for spec in schema.tensors:
        if spec.dtype not in DTYPES:
            raise CorruptError(f"tensor {spec.name!r} is {spec.dtype}, which no engine computes in")


def _starts(schema: Schema) -> element_codes.Numbers:
    """First number of each tensor's elements, with a gap of one between two tensors.  [t + 1]."""
    counts = (spec.elements + 1 for spec in schema.tensors)
    return np.fromiter(accumulate(counts, initial=0), np.int64)


def _batches(flat: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for name, found in flat.items():
        if batch and size + found.numel() > BATCH_ELEMENTS:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += found.numel()
    if batch:
        yield batch

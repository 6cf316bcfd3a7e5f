"""Checkpoint layout: the position of each element of a live tensor in the Hugging Face checkpoint.

Most tensors of a module are tensors of its checkpoint, perhaps under another name. Some
architectures fuse tensors when they load: those are traced by converting the positions of their
elements back instead of their values.
"""

import itertools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from etude.common.weights.tensors.schema import Grid, Schema, TensorSpec, split_of
from etude.trainer.model import tensor_bits
from etude.trainer.model.shard_runs import ShardRuns, intersect_runs

log = logging.getLogger(__name__)

MIN_MEAN_RUN = 64
"""A tensor whose runs are shorter on average is scattered: a list of its runs would outgrow it."""


class LayoutPiece(NamedTuple):
    """Consecutive elements of a source that are consecutive in a tensor of the checkpoint."""

    source: str
    start: int
    """In the source, row-major."""
    tensor: str
    first: int
    """In the tensor, row-major."""
    length: int


class CheckpointLayout(NamedTuple):
    """The published schema of a policy, and the live tensors that its elements come from."""

    schema: Schema
    pieces: dict[str, list[LayoutPiece]]
    """By source, in the order of its elements, all of them."""
    scattered: tuple[str, ...]
    """Sources that can only be converted complete, and together."""


def live_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of a model, live and sharded as they are, tied ones once."""
    own = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - own
    return {name: value for name, value in model.state_dict().items() if name not in tied}


def trace_layout(
    model: PreTrainedModel, *, dtype: tensor_bits.Dtype, grid: Grid
) -> CheckpointLayout:
    """Trace the layout of a model's tensors in its checkpoint; reads no weight."""
    found = live_tensors(model)
    # Tensors without data go through the same conversion: what comes out as the very object that
    # went in was renamed at most.
    blanks = {n: torch.empty(t.shape, dtype=torch.int64, device="meta") for n, t in found.items()}
    named = revert_weight_conversion(model, dict(blanks))
    origin = {id(blank): name for name, blank in blanks.items()}
    renamed = {name: origin[id(value)] for name, value in named.items() if id(value) in origin}
    formats = {
        n: tensor_bits.wire_dtype(found[source], dtype=dtype) for n, source in renamed.items()
    }
    schema = _schema(named, formats, fused=tensor_bits.FLOATS[dtype], grid=grid)
    pieces = {
        source: [LayoutPiece(source, 0, name, 0, found[source].numel())]
        for name, source in renamed.items()
    }
    tracer = _Tracer(model, schema)
    for source in sorted(blanks.keys() - pieces.keys()):
        traced = tracer.trace(source, tuple(blanks[source].shape))
        if traced:
            pieces[source] = traced
    _drop_partial(pieces, schema)
    scattered = tuple(sorted(blanks.keys() - pieces.keys()))
    if scattered:
        log.warning(
            "%d tensors are published completely in each version, because the checkpoint's layout"
            " scatters them: %s",
            len(scattered),
            ", ".join(scattered[:5]),
        )
    return CheckpointLayout(schema, pieces, scattered)


def cut_pieces(pieces: Sequence[LayoutPiece], runs: ShardRuns) -> Iterator[tuple[LayoutPiece, int]]:
    """Parts of the pieces of one source that a shard holds, each with its place in the shard."""
    starts = np.array([piece.start for piece in pieces], np.int64)
    lengths = np.array([piece.length for piece in pieces], np.int64)
    # In the order of the source, the pieces are a shard of it that holds everything.
    overlap = intersect_runs(ShardRuns(starts, starts, lengths), runs)
    numbers = np.searchsorted(starts, overlap.first, side="right") - 1
    for number, start, place, length in zip(
        *(each.tolist() for each in (numbers, *overlap)), strict=True
    ):
        piece = pieces[number]
        first = piece.first + start - piece.start
        yield piece._replace(start=start, first=first, length=length), place


def to_checkpoint_tensors(
    model: PreTrainedModel, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Convert complete tensors of a model to the layout of its checkpoint."""
    found: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return found


def _schema(
    named: Mapping[str, Tensor],
    formats: Mapping[str, torch.dtype],
    *,
    fused: torch.dtype,
    grid: Grid,
) -> Schema:
    specs = [
        TensorSpec(
            name=name,
            dtype=tensor_bits.NAMES[formats.get(name, fused)],
            shape=tuple(value.shape),
            split=split_of(name),
        )
        for name, value in sorted(named.items())
    ]
    return Schema(grid=grid, tensors=tuple(specs))


class _Tracer:
    """Finds the pieces of fused tensors by converting element positions instead of values."""

    def __init__(self, model: PreTrainedModel, schema: Schema) -> None:
        self._model = model
        self._schema = schema
        self._known: dict[tuple[str, tuple[int, ...]], list[LayoutPiece]] = {}

    def trace(self, source: str, shape: tuple[int, ...]) -> list[LayoutPiece]:
        """The pieces of one source; none if it is scattered, or fused with others."""
        # Conversions are chosen by patterns that cannot tell one layer from another, so that a
        # source of the same shape and the same name but for its layer has the same pieces.
        digits = re.findall(r"\d+", source)
        key = (re.sub(r"\d+", "#", source), shape)
        if digits and key in self._known:
            again = [_renumber(piece, source) for piece in self._known[key]]
            return again if all(piece.tensor in self._schema.index for piece in again) else []
        self._known[key] = self._trace_pieces(source, shape)
        return self._known[key]

    def _trace_pieces(self, source: str, shape: tuple[int, ...]) -> list[LayoutPiece]:
        elements = int(np.prod(shape))
        places = torch.arange(elements, dtype=torch.int64).reshape(shape)
        try:
            named = to_checkpoint_tensors(self._model, {source: places})
        except (ValueError, RuntimeError, KeyError, IndexError, TypeError) as error:
            log.debug("%s cannot be converted alone: %s", source, error)
            return []
        pieces: list[LayoutPiece] = []
        for name, value in named.items():
            spec = self._schema.index.get(name)
            if (
                spec is None
                or tuple(value.shape) != self._schema.tensors[spec].shape
                or value.dtype != torch.int64
            ):
                return []
            pieces += _runs(source, name, value.reshape(-1).numpy())
        pieces.sort(key=lambda piece: piece.start)
        is_fine = len(pieces) * MIN_MEAN_RUN <= max(elements, MIN_MEAN_RUN * len(named))
        return pieces if is_fine and _covers_all(pieces, elements) else []


def _runs(source: str, name: str, places: npt.NDArray[np.int64]) -> Iterable[LayoutPiece]:
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    bounds = [0, *cuts.tolist(), places.size]
    for first, after in itertools.pairwise(bounds):
        yield LayoutPiece(source, int(places[first]), name, first, after - first)


def _covers_all(pieces: Iterable[LayoutPiece], elements: int) -> bool:
    """True if the pieces hold every element of their source once."""
    end = 0
    for piece in pieces:
        if piece.start != end:
            return False
        end += piece.length
    return end == elements


def _renumber(piece: LayoutPiece, source: str) -> LayoutPiece:
    """The same piece of the same tensor in another layer."""
    was, now = re.findall(r"\d+", piece.source), re.findall(r"\d+", source)
    parts = re.split(r"(\d+)", piece.tensor)
    # The source's numbers lead the tensor's: what follows them, an expert's say, stays.
    for place, (before, after) in enumerate(zip(was, now, strict=True)):
        if 2 * place + 1 < len(parts) and parts[2 * place + 1] == before:
            parts[2 * place + 1] = after
    return piece._replace(source=source, tensor="".join(parts))


def _drop_partial(pieces: dict[str, list[LayoutPiece]], schema: Schema) -> None:
    """Remove sources of tensors that the pieces do not make up: these are fused with others."""
    while True:
        held = dict.fromkeys(schema.index, 0)
        for piece in itertools.chain(*pieces.values()):
            held[piece.tensor] += piece.length
        whole = {spec.name for spec in schema.tensors if held[spec.name] == spec.elements}
        partial = [s for s, each in pieces.items() if not all(p.tensor in whole for p in each)]
        if not partial:
            return
        for source in partial:
            del pieces[source]

"""Live weights behind the model's loader, for parameters that no weight map can reach.

If parameters are computed from the checkpoint's tensors, every rank of the group keeps the
checkpoint's words in host memory, changes those, and sends each changed tensor through the
model's own loader during activation. That costs one model of host memory per rank, and the loads
make the pause longer; the result is as exact.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from typing_extensions import override

from etude.common.errors import CorruptError
from etude.common.weights.replicas.live_weights import LiveWeights
from etude.common.weights.replicas.patches import PreparedPatches
from etude.common.weights.replicas.regions import identity_regions
from etude.common.weights.tensors.schema import Schema
from etude.common.weights.tensors.words import Words, word_type
from etude.inference.worker.tensors import DTYPES, as_tensor
from etude.inference.worker.weight_map import Load


class ReloadedWeights(LiveWeights):
    """A copy of the checkpoint; each change of it is loaded into the model."""

    def __init__(self, model: torch.nn.Module, load: Load, schema: Schema, *, counts: bool) -> None:
        """Copy the words of a model; its floating-point parameters are overwritten.

        Args:
            model: the loaded model.
            load: its loader, which takes any part of a checkpoint.
            schema: of the policy.
            counts: whether this rank counts in the state digest: one of them must.

        Raises:
            CorruptError: the tensors leave a parameter unfilled, or are of another format.
        """
        self._load = load
        self._specs = {spec.name: spec for spec in schema.tensors}
        self._copy: dict[str, Words] = {
            spec.name: np.zeros(spec.elements, word_type(spec.dtype)) for spec in schema.tensors
        }
        _check_formats(model, schema)
        self._check_filled(model)
        regions = {
            place: [region._replace(counted=counts) for region in found]
            for place, found in identity_regions(schema).items()
        }
        super().__init__(schema, self._copy, regions)

    @override
    def write(self, prepared: PreparedPatches) -> bool:
        sound = super().write(prepared)
        self._send(_names(prepared))
        return sound

    @override
    def undo(self, prepared: PreparedPatches) -> bool:
        sound = super().undo(prepared)
        self._send(_names(prepared))
        return sound

    @torch.no_grad()
    def _send(self, names: Iterable[str]) -> None:
        self._load(self._tensors(names))

    def _tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            spec = self._specs[name]
            yield name, as_tensor(self._copy[name], spec.dtype, spec.shape)

    @torch.no_grad()
    def _check_filled(self, model: torch.nn.Module) -> None:
        parameters = {n: p for n, p in model.named_parameters() if p.is_floating_point()}
        for parameter in parameters.values():
            parameter.fill_(float("nan"))
        try:
            self._send(self._specs)
        except (AssertionError, IndexError, KeyError, RuntimeError, ValueError) as cause:
            raise CorruptError(f"the tensors do not fit the model: {cause!r}") from cause
        missing = [name for name, p in parameters.items() if bool(torch.isnan(p).any())]
        if missing:
            raise CorruptError(f"the version leaves {missing[:4]} unfilled")


def _names(prepared: PreparedPatches) -> list[str]:
    """The tensors of which a change touches elements."""
    return sorted({patch.parameter for patch in prepared.patches})


def _check_formats(model: torch.nn.Module, schema: Schema) -> None:
    """Refuse tensors of another format: a loader would convert them silently.

    Raises:
        CorruptError: names the first such tensor.
    """
    live = {p.dtype for p in model.parameters() if p.is_floating_point()}
    for spec in schema.tensors:
        dtype = DTYPES.get(spec.dtype)
        if dtype is None or (dtype.is_floating_point and dtype not in live):
            raise CorruptError(
                f"tensor {spec.name!r} is {spec.dtype}, but the engine computes in "
                f"{sorted(map(str, live))}; spec.weights.dtype sets both"
            )

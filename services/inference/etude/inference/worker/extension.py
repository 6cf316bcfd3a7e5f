"""What vLLM adds to each of its workers (`worker_extension_cls`)."""

from collections.abc import Mapping
from typing import Any

import torch

from etude.common.weights.replicas.live import LiveWeights
from etude.common.weights.tensors.schema import Schema
from etude.inference.worker.bake import Load, bake
from etude.inference.worker.device import DeviceLiveWeights
from etude.inference.worker.rank import Answer, Rank
from etude.inference.worker.reloaded import ReloadedWeights


class WeightWorker:
    """The methods of `Rank` on the model of a worker; called by AsyncLLM.collective_rpc."""

    model_runner: Any
    _etude_rank: Rank | None = None

    def bake(self, schema: bytes, sha256: str, loads: bool) -> Answer:  # noqa: FBT001 - as Rank
        """Map the checkpoint to the live parameters, which are overwritten."""
        return self._rank().bake(schema, sha256, loads)

    def count(self, flags: Mapping[str, bytes]) -> str:
        """Count some regions, as the group agreed; the digest of those."""
        return self._rank().count(flags)

    def prepare(
        self,
        path: str,
        keep_old: bool,  # noqa: FBT001 - called by position
        committed: int,
        kept: int,
    ) -> None:
        """Begin to gather what a staged version changes."""
        self._rank().prepare(path, keep_old, committed, kept)

    def prepared(self) -> Answer | None:
        """What came of it; None while it is being worked on."""
        return self._rank().prepared()

    def commit(self) -> bool:
        """Write what was prepared."""
        return self._rank().commit()

    def undo(self, number: int) -> bool:
        """Write the old words of one version again."""
        return self._rank().undo(number)

    def scan(self) -> str:
        """The state digest of what is live."""
        return self._rank().scan()

    def start_scan(self) -> None:
        """Begin to scan beside the forward passes."""
        self._rank().start_scan()

    def scanned(self) -> str | None:
        """What start_scan() found; None while it is at it."""
        return self._rank().scanned()

    def _rank(self) -> Rank:
        if self._etude_rank is None:
            self._etude_rank = Rank(self._open_live)
        return self._etude_rank

    def _open_live(
        self,
        schema: Schema,
        loads: bool,  # noqa: FBT001 - as above
    ) -> LiveWeights | DeviceLiveWeights:
        model = self.model_runner.get_model()
        return open_live(model, model.load_weights, schema, loads=loads)


def open_live(
    model: torch.nn.Module, load: Load, schema: Schema, *, loads: bool
) -> LiveWeights | DeviceLiveWeights:
    """The live words themselves, or a copy behind the loader.

    Args:
        model: what computes.
        load: its loader.
        schema: of the policy.
        loads: whether changed tensors are to be loaded, not written in place.

    Raises:
        CorruptError: the schema does not describe the model.
        ComputedError: a map does not reach all of it.
    """
    if loads:
        return ReloadedWeights(model, load, schema, counts=True)
    found = bake(model, load, schema)
    if any(flat.device.type != "cpu" for flat in found.tensors.values()):
        return DeviceLiveWeights(schema, found.tensors, found.regions)
    return LiveWeights(schema, found.parameters, found.regions)

"""What vLLM adds to each of its workers (`worker_extension_cls`)."""

import logging
from typing import Any

import torch

from etude.common.errors import CorruptError
from etude.common.weights.live import LiveWeights
from etude.common.weights.schema import Schema
from etude.inference.worker.bake import ComputedError, Load, bake
from etude.inference.worker.rank import Answer, Rank
from etude.inference.worker.reloaded import ReloadedWeights

log = logging.getLogger(__name__)


class WeightWorker:
    """The methods of `Rank` on the model of a worker; called by AsyncLLM.collective_rpc."""

    model_runner: Any
    rank: int
    _etude_rank: Rank | None = None

    def bake(self, schema: bytes, sha256: str, may_load: bool) -> Answer:  # noqa: FBT001 - as Rank
        """Map the checkpoint to the live parameters, which are overwritten."""
        return self._rank().bake(schema, sha256, may_load)

    def prepare(self, path: str, keep_old: bool) -> None:  # noqa: FBT001 - called by position
        """Begin to gather what a staged version changes."""
        self._rank().prepare(path, keep_old)

    def prepared(self) -> Answer | None:
        """What came of it; None while it is being worked on."""
        return self._rank().prepared()

    def commit(self) -> bool:
        """Write what was prepared."""
        return self._rank().commit()

    def undo(self) -> bool:
        """Write the old words again."""
        return self._rank().undo()

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

    def _open_live(self, schema: Schema, may_load: bool) -> LiveWeights:  # noqa: FBT001 - as above
        model = self.model_runner.get_model()
        load = model.load_weights
        return open_live(model, load, schema, counts=self.rank == 0, may_load=may_load)


def open_live(
    model: torch.nn.Module, load: Load, schema: Schema, *, counts: bool, may_load: bool
) -> LiveWeights:
    """The live words themselves where a map reaches them, else a copy behind the loader.

    Raises:
        CorruptError: the schema does not describe the model.
        ComputedError: a map does not reach all of it, and tensors may not be loaded.
    """
    is_on_device = any(parameter.device.type != "cpu" for parameter in model.parameters())
    if is_on_device and not may_load:
        raise CorruptError("parameters on a device take no changes in place; encoding: Auto loads")
    if is_on_device:
        return ReloadedWeights(model, load, schema, counts=counts)
    try:
        found = bake(model, load, schema)
    except ComputedError as error:
        if not may_load:
            raise
        log.warning("changed tensors will be loaded, not written in place: %s", error)
        return ReloadedWeights(model, load, schema, counts=counts)
    return LiveWeights(schema, found.parameters, found.regions)

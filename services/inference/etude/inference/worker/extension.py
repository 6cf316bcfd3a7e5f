"""Worker extension that vLLM mixes into each of its workers (`worker_extension_cls`)."""

from collections.abc import Mapping
from typing import Any

import torch

from etude.common.weights.replicas.live_weights import LiveWeights
from etude.common.weights.tensors.schema import Schema
from etude.inference.worker.device.live_weights import DeviceLiveWeights
from etude.inference.worker.rank import Rank, RankAnswer
from etude.inference.worker.reloaded_weights import ReloadedWeights
from etude.inference.worker.weight_map import Load, build_weight_map


class WeightWorker:
    """The methods of `Rank` on the model of a worker; called by AsyncLLM.collective_rpc."""

    model_runner: Any
    _etude_rank: Rank | None = None

    def build_map(self, schema: bytes, sha256: str, uses_loader: bool) -> RankAnswer:  # noqa: FBT001 - as Rank
        """Map the checkpoint to the live parameters, which are overwritten."""
        return self._rank().build_map(schema, sha256, uses_loader)

    def set_counted(self, flags: Mapping[str, bytes]) -> str:
        """Count some regions, as the group agreed; the digest of those."""
        return self._rank().set_counted(flags)

    def prepare(
        self,
        path: str,
        keep_old: bool,  # noqa: FBT001 - called by position
        committed: int,
        kept: int,
    ) -> None:
        """Start gathering the changes of a staged version."""
        self._rank().prepare(path, keep_old, committed, kept)

    def poll_prepared(self) -> RankAnswer | None:
        """Result of prepare(); None while it runs."""
        return self._rank().poll_prepared()

    def activate(self) -> bool:
        """Write the prepared change."""
        return self._rank().activate()

    def undo(self, number: int) -> bool:
        """Write the old words of one version again."""
        return self._rank().undo(number)

    def scan(self) -> str:
        """The state digest of what is live."""
        return self._rank().scan()

    def start_scan(self) -> None:
        """Start a scan, concurrently with forward passes."""
        self._rank().start_scan()

    def poll_scan(self) -> str | None:
        """Digest of start_scan(); None while it runs."""
        return self._rank().poll_scan()

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
        return open_live(model, model.load_weights, schema, uses_loader=loads)


def open_live(
    model: torch.nn.Module, load: Load, schema: Schema, *, uses_loader: bool
) -> LiveWeights | DeviceLiveWeights:
    """Open the live words of a model, or a copy behind its loader.

    Args:
        model: the loaded model.
        load: its loader.
        schema: of the policy.
        uses_loader: whether changed tensors are to be loaded, not written in place.

    Raises:
        CorruptError: the schema does not describe the model.
        ComputedError: a map does not reach all of it.
    """
    if uses_loader:
        return ReloadedWeights(model, load, schema, counts=True)
    found = build_weight_map(model, load, schema)
    if any(flat.device.type != "cpu" for flat in found.tensors.values()):
        return DeviceLiveWeights(schema, found.tensors, found.regions)
    return LiveWeights(schema, found.parameters, found.regions)

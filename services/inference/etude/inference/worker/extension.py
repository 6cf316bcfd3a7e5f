"""Worker extension that vLLM mixes into each of its workers (`worker_extension_cls`)."""

from typing import Any

import torch

from etude.common.routed_experts import ExpertIds
from etude.common.weights.replicas.live_weights import LiveWeights
from etude.common.weights.tensors.schema import Schema
from etude.inference.worker.device.live_weights import DeviceLiveWeights
from etude.inference.worker.drafted_model import DraftedModel
from etude.inference.worker.rank import Rank
from etude.inference.worker.reloaded_weights import ReloadedWeights
from etude.inference.worker.route_recorder import RouteRecorder
from etude.inference.worker.weight_map import Load, build_weight_map


class WeightWorker:
    """Gives each worker a `Rank` over its model."""

    model_runner: Any
    _etude_rank: Rank | None = None
    _etude_routes: RouteRecorder | None = None

    def call_rank(self, method: str, *args: object) -> Any:  # noqa: ANN401 - as the method
        """Call a method of the rank; AsyncLLM.collective_rpc calls this on every worker."""
        if self._etude_rank is None:
            self._etude_rank = Rank(self._open_live)
        return getattr(self._etude_rank, method)(*args)

    def record_routes(self) -> str:
        """Record the experts of requests that ask for them; repeatable.

        Returns:
            Reason why they cannot be recorded; empty if they are.
        """
        if self._etude_routes is None:
            try:
                self._etude_routes = RouteRecorder(self.model_runner)
            except ValueError as error:
                return str(error)
        return ""

    def read_routes(self, request_id: str, start: int) -> ExpertIds | None:
        """Read the experts of a request's tokens from a position on; None if there are none."""
        return None if self._etude_routes is None else self._etude_routes.read(request_id, start)

    def forget_routes(self, request_id: str) -> None:
        """Forget the experts of a request that has ended."""
        if self._etude_routes is not None:
            self._etude_routes.forget(request_id)

    def _open_live(
        self,
        schema: Schema,
        loads: bool,  # noqa: FBT001 - as Rank calls it
    ) -> LiveWeights | DeviceLiveWeights:
        model = self.model_runner.get_model()
        draft = getattr(getattr(self.model_runner, "drafter", None), "model", None)
        if isinstance(draft, torch.nn.Module):
            model = DraftedModel(model, draft)
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
        ComputedParameterError: a map does not reach all of it.
    """
    if uses_loader:
        return ReloadedWeights(model, load, schema, counts=True)
    found = build_weight_map(model, load, schema)
    if any(flat.device.type != "cpu" for flat in found.tensors.values()):
        return DeviceLiveWeights(schema, found.tensors, found.regions)
    return LiveWeights(schema, found.parameters, found.regions)

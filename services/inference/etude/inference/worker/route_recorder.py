"""Expert ids that the routers of one worker chose, by request.

The flag of vLLM 0.32 for it (enable_return_routed_experts) needs a model runner that its CPU build
has not. Ids are kept by slot of the KV cache: a prefix that a request shares with an earlier one
was routed then, and its ids lie where its keys and values lie.
Shapes: P positions of a request, M layers with experts, k choices of a token.
"""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from etude.common.routed_experts import ExpertIds

ROUTES_FROM = "etude_routes_from"
"""Extra argument of a request that asks for its experts: the first position."""
MAX_ENDED = 256
"""Ended requests whose ids are kept until they are read; the oldest are dropped."""


@dataclass(slots=True)
class RequestRoutes:
    """Ids of one request's positions [first, end)."""

    first: int
    end: int
    parts: list[ExpertIds] = field(default_factory=list)

    def add(self, ids: ExpertIds, known: int, settled: int) -> None:
        """Add the ids of a pass that processed the positions behind the known ones.

        A position that is processed again keeps the ids of the pass whose logits gave the token
        behind it, as after a swap the new version may choose others. Guesses that were wrong get
        new ones.

        Args:
            ids: of the pass.
            known: positions with keys and values before the pass.
            settled: positions whose next token was known before the pass, not guessed.
        """
        self._cut(max(known, settled))
        self.append(ids[max(0, self.end - known) :])

    def _cut(self, end: int) -> None:
        """Drop the ids of the positions from an end on."""
        while self.parts and self.end > end:
            last = self.parts.pop()
            kept = max(0, len(last) - (self.end - end))
            self.end -= len(last) - kept
            if kept:
                self.parts.append(last[:kept])
        self.end = min(self.end, end)

    def append(self, ids: ExpertIds) -> None:
        """Append the ids of the next positions, of which those before the first are left out."""
        own = ids[max(0, self.first - self.end) :]
        self.end += len(ids)
        if len(own):
            self.parts.append(own)

    def read(self, start: int) -> ExpertIds | None:
        """Ids of the positions from start on; None if there are none. [P, M, k].

        Those before are not kept: no caller reads a position twice.
        """
        if start >= self.end or not self.parts:
            return None
        ids: ExpertIds = np.concatenate(self.parts)[max(0, start - self.first) :]
        self.first, self.parts = max(start, self.first), [ids]
        return ids


class RouteRecorder:
    """Records the experts of each processed token; calls come one at a time."""

    def __init__(self, runner: Any) -> None:  # noqa: ANN401 - vLLM's model runner
        """Hook into the routers of a model runner.

        Raises:
            ValueError: the model has no experts, or routers that cannot be observed.
        """
        _check_runner(runner)
        self._runner = runner
        self._step: dict[int, torch.Tensor] = {}
        """Ids of the pass under way, by layer."""
        self._requests: dict[str, RequestRoutes] = {}
        layers = [module for module in runner.get_model().modules() if _is_layer(module)]
        if not layers:
            raise ValueError("the model has no experts, so there are no routes to record")
        for index, layer in enumerate(layers):
            layer.router.set_capture_fn(partial(self._step.__setitem__, index))
        experts = layers[0].router.global_num_experts
        self._shape = (len(layers), layers[0].router.top_k)
        self._dtype = np.uint8 if experts < np.iinfo(np.uint8).max else np.uint16
        self._missing = np.iinfo(self._dtype).max
        self._block_size = runner.input_batch.block_table[0].block_size
        self._by_slot = self._blank(runner.kv_cache_config.num_blocks * self._block_size)
        self._execute: Callable[..., Any] = runner.execute_model
        runner.execute_model = self._execute_and_record

    def read(self, request_id: str, start: int) -> ExpertIds | None:
        """Read the ids of a request from a position on, by the id that its caller gave.

        The last sampled token has none: it is processed with the next prompt. [P, M, k].
        """
        name = self._name(request_id)
        return None if name is None else self._requests[name].read(start)

    def forget(self, request_id: str) -> None:
        """Forget the ids of a request."""
        name = self._name(request_id)
        if name is not None:
            del self._requests[name]

    def _name(self, request_id: str) -> str | None:
        # vLLM appends eight random characters to the ids of callers.
        return next((n for n in self._requests if n.rpartition("-")[0] == request_id), None)

    def _execute_and_record(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
        result = self._execute(scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            self._record(scheduler_output.num_scheduled_tokens)
        return result

    def _record(self, num_tokens: dict[str, int]) -> None:
        batch = self._runner.input_batch
        total = sum(num_tokens.values())
        layers = [self._step[index][:total] for index in range(self._shape[0])]
        ids = torch.stack(layers, 1).cpu().numpy().astype(self._dtype)
        slots = batch.block_table[0].slot_mapping.gpu[:total].cpu().numpy()
        self._by_slot[slots] = ids
        start = 0
        for index, name in enumerate(batch.req_ids):
            end = start + num_tokens[name]
            self._record_request(index, name, ids[start:end])
            start = end
        if len(self._requests) > MAX_ENDED:
            self._drop_ended()

    def _record_request(self, index: int, name: str, ids: ExpertIds) -> None:
        """Record the ids of one request of a pass, if it asks for them."""
        first = self._first_wanted(name)
        if first is None:
            return
        batch = self._runner.input_batch
        known = int(batch.num_computed_tokens_cpu[index])
        routes = self._requests.get(name)
        if routes is None or routes.end < known:  # cached
            routes = self._requests[name] = RequestRoutes(first, 0)
            routes.append(self._cached(index, known))
        # Tokens of this pass are sampled after it.
        routes.add(ids, known, settled=int(batch.num_tokens_no_spec[index]) - 1)

    def _first_wanted(self, name: str) -> int | None:
        """First position whose ids a request asks for; None if it does not."""
        params = self._runner.requests[name].sampling_params
        extra = None if params is None else params.extra_args
        first: int | None = (extra or {}).get(ROUTES_FROM)
        return first

    def _drop_ended(self) -> None:
        for name in find_dropped(self._requests, self._runner.requests):
            del self._requests[name]

    def _cached(self, index: int, length: int) -> ExpertIds:
        """Ids of a request's first positions, whose keys and values are in the cache."""
        num_blocks = -(-length // self._block_size)
        blocks = self._runner.input_batch.block_table[0].block_table.np[index, :num_blocks]
        slots = blocks[:, None].astype(np.int64) * self._block_size + np.arange(self._block_size)
        cached: ExpertIds = self._by_slot[slots.ravel()[:length]]
        return cached

    def _blank(self, length: int) -> ExpertIds:
        blank: ExpertIds = np.full((length, *self._shape), self._missing, dtype=self._dtype)
        return blank


def find_dropped(recorded: Iterable[str], running: Container[str]) -> list[str]:
    """Find the ended requests whose ids are dropped: all but the newest.

    Args:
        recorded: requests with ids, the oldest first.
        running: requests that have not ended.
    """
    ended = [name for name in recorded if name not in running]
    return ended[: max(0, len(ended) - MAX_ENDED)]


def _check_runner(runner: Any) -> None:  # noqa: ANN401 - vLLM's model runner
    """Refuse a runner of which this worker sees only a part.

    Raises:
        ValueError: it names the argument to change.
    """
    parallel = runner.parallel_config
    if not runner.model_config.enforce_eager:
        raise ValueError("graphs call no hooks; set enforce_eager to record experts")
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        if getattr(parallel, name) > 1:
            raise ValueError(f"each part of the engine has its own routers; set {name} to 1")


def _is_layer(module: torch.nn.Module) -> bool:
    """True for vLLM's layer of experts, a MoERunner.

    Raises:
        ValueError: its router cannot be observed.
    """
    router, method = getattr(module, "router", None), getattr(module, "_quant_method", None)
    if router is None or method is None:
        return False
    # A monolithic kernel chooses experts without its router.
    if not hasattr(router, "set_capture_fn") or method.is_monolithic:
        raise ValueError(f"routes of {type(router).__name__} cannot be recorded")
    return True

"""Expert ids that the routers of one worker chose, by request.

The flag of vLLM 0.32 for it (enable_return_routed_experts) needs a model runner that its CPU build
has not. Ids are kept by slot of the KV cache: a prefix that a request shares with an earlier one
was routed then, and its ids lie where its keys and values lie.
Shapes: P positions of a request, M layers with experts, k choices of a token.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Ids = NDArray[Any]
"""Bytes, or words of two bytes where a byte does not name all experts."""

MAX_REQUESTS = 4_096
"""Requests whose ids are kept until they are asked for; the oldest are dropped."""


class RouteRecorder:
    """Records the experts of each processed token; calls come one at a time."""

    def __init__(self, runner: Any) -> None:  # noqa: ANN401 - vLLM's model runner
        """Hook into the routers of a model runner.

        Raises:
            ValueError: the model has no experts, or routers that cannot be observed.
        """
        self._runner = runner
        self._step: dict[int, torch.Tensor] = {}
        """Ids of the pass under way, by layer."""
        self._parts: dict[str, list[Ids]] = {}
        """Ids of each request, pass by pass. [P, M, k] in all"""
        self._lengths: dict[str, int] = {}
        """Positions of each request that have ids."""
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

    def take(self, request_id: str) -> Ids | None:
        """Take the ids of a request out, by the id that its caller gave; None if none were kept.

        The last sampled token has none: it is processed with the next prompt. [P, M, k].
        """
        # vLLM appends eight random characters to the ids of callers.
        name = next((n for n in self._parts if n.rpartition("-")[0] == request_id), None)
        if name is None:
            return None
        del self._lengths[name]
        return np.concatenate(self._parts.pop(name))

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
            known = int(batch.num_computed_tokens_cpu[index])
            if self._lengths.get(name) != known:  # cached, or computed again
                self._parts[name] = [self._cached(index, known)]
            self._parts[name].append(ids[start:end])
            self._lengths[name] = known + end - start
            start = end
        while len(self._parts) > MAX_REQUESTS:
            oldest = next(iter(self._parts))
            del self._parts[oldest], self._lengths[oldest]

    def _cached(self, index: int, length: int) -> Ids:
        """Ids of a request's first positions, whose keys and values are in the cache."""
        num_blocks = -(-length // self._block_size)
        blocks = self._runner.input_batch.block_table[0].block_table.np[index, :num_blocks]
        slots = blocks[:, None].astype(np.int64) * self._block_size + np.arange(self._block_size)
        cached: Ids = self._by_slot[slots.ravel()[:length]]
        return cached

    def _blank(self, length: int) -> Ids:
        return np.full((length, *self._shape), self._missing, dtype=self._dtype)


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

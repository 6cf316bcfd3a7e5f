"""One vLLM engine that samples tokens and swaps weights between two forward passes."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from etude.common.errors import InvalidFieldError, Problem, UnavailableError, UserError
from etude.common.weights import VersionId
from etude.inference.engine import arguments as engine_arguments
from etude.inference.engine.core import threaded_core
from etude.inference.engine.interface import (
    EngineInfo,
    Finish,
    LabelSpan,
    PolicyEngine,
    SampleRequest,
    TokenChunk,
)
from etude.inference.engine.plugin import BACKEND, SET_SPECULATION
from etude.inference.engine.prefix_cache import PrefixCacheSalts
from etude.inference.engine.route_reader import RouteReader
from etude.inference.engine.speculation import EngineCounts, SpeculativeEngine, read_registry
from etude.inference.settings import EngineOptions
from etude.inference.swap.coordinator import SwapCoordinator
from etude.inference.swap.forward_gate import ForwardGate
from etude.inference.swap.ranks import Ranks
from etude.inference.worker.extension import WeightWorker
from etude.inference.worker.route_recorder import ROUTES_FROM

CPU_BLOCK_SIZE = 32
"""Tokens that share one KV block; the CPU kernels take multiples of 32, and prefixes are shared in
whole blocks."""

WORKER_EXTENSION = f"{WeightWorker.__module__}.{WeightWorker.__qualname__}"

DRAIN_POLL_S = 0.01
"""Polling interval of a draining engine for the end of its requests."""

_FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}


class _GatedLLM(AsyncLLM):  # type: ignore[misc]  # mypy does not follow vLLM
    """Separates the prefix caches of policy versions; holds requests while the gate is shut."""

    salt: str = ""
    """Default cache salt of requests."""
    salt_by_request: dict[str, str] | None = None
    """Salts of requests that are being admitted, by request id."""
    gate: asyncio.Event | None = None
    """Clear while new requests must wait; None or set while they are admitted."""

    @override
    async def add_request(self, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if self.gate is not None:
            await self.gate.wait()
        salt = (self.salt_by_request or {}).get(request_id, self.salt)
        if salt and isinstance(prompt, dict):
            own = prompt.get("cache_salt")
            prompt = {**prompt, "cache_salt": f"{salt}:{own}" if own else salt}
        return await super().add_request(request_id, prompt, *args, **kwargs)

    @override
    def __del__(self) -> None:
        """Do nothing: vLLM's own shuts down again while the interpreter is torn down."""


class VllmRanks(Ranks):
    """The workers of one vLLM engine, each extended by WeightWorker."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._is_data_parallel = llm.vllm_config.parallel_config.data_parallel_size > 1

    @override
    async def call(self, method: str, *args: object) -> Sequence[Any]:
        with _vllm_errors():
            if self._is_data_parallel:
                # vLLM's own call returns the answers of the first copy alone.
                copies = await self._llm.engine_core.call_utility_all_async(
                    "collective_rpc", "call_rank", None, (method, *args), None
                )
                return [answer for copy in copies for answer in copy]
            answers: Sequence[Any] = await self._llm.collective_rpc(
                "call_rank", args=(method, *args)
            )
        return answers


class Replica(PolicyEngine, ForwardGate, SpeculativeEngine):
    """PolicyEngine on vLLM."""

    def __init__(self, llm: _GatedLLM, options: EngineOptions) -> None:
        self.llm = llm
        self.options = options
        self.swap = SwapCoordinator(
            VllmRanks(llm),
            self,
            may_load=options.may_load,
            max_undo=options.undo_depth,
            drain_s=options.drain_s,
        )
        config = llm.model_config
        self.info = EngineInfo(
            model=options.served_name,
            vocab_size=config.get_vocab_size(),
            max_model_len=config.max_model_len,
            max_concurrent=options.max_concurrent,
            recomputes_kv_cache=options.recompute_kv or options.prefix_cache == "Reset",
            records_routes=config.is_moe and config.enforce_eager and options.follows_store,
        )
        self.prefix_cache = PrefixCacheSalts(options.prefix_cache, options.sticky_lag)
        self._salt_by_request: dict[str, str] = {}
        self.llm.salt_by_request = self._salt_by_request
        self._gate = asyncio.Event()
        self._gate.set()
        self.llm.gate = self._gate
        self._label: VersionId | None = None
        self._is_recording = False
        self._recording_lock = asyncio.Lock()

    @property
    @override
    def live(self) -> VersionId | None:
        return self._label

    @property
    @override
    def failed(self) -> str:
        return self.swap.failed or ("the engine's forward pass failed" if self.llm.errored else "")

    @override
    async def generate(self, request: SampleRequest) -> AsyncGenerator[TokenChunk, None]:
        # A request that waited is admitted under the version that is live afterwards.
        await self._gate.wait()
        oldest, routes = None, RouteReader.of(request, self._call_workers)
        if routes is not None:
            await self._record_routes()
        if self._label is not None:
            oldest, salt = self.prefix_cache.admit(self._label, request.rollout)
            self._salt_by_request[request.request_id] = salt
        prompt = tokens_input(list(request.prompt_token_ids))
        outputs = self.llm.generate(prompt, _sampling_params(request), request.request_id)
        try:
            with _vllm_errors():
                async with contextlib.aclosing(outputs):
                    num_tokens = 0
                    async for output in outputs:
                        num_tokens += len(output.outputs[0].token_ids)
                        chunk = _token_chunk(output, oldest)
                        if chunk.finish is None and request.chunk_tokens:
                            labels = self._labels(request.request_id, num_tokens)
                            chunk = replace(chunk, labels=labels, admitted=oldest)
                        if routes is not None:
                            chunk = replace(chunk, routes=await routes.read_new(num_tokens))
                        yield chunk
        finally:
            self._salt_by_request.pop(request.request_id, None)
            if routes is not None:
                with contextlib.suppress(UnavailableError):
                    await routes.forget()

    async def _record_routes(self) -> None:
        """Record the experts of requests from now on; repeatable.

        Raises:
            InvalidFieldError: the workers cannot.
        """
        async with self._recording_lock:
            if self._is_recording:
                return
            for problem in await self._call_workers("record_routes"):
                if problem:
                    raise InvalidFieldError("routes_from", problem)
            # Prefixes that were cached before have no experts.
            with _vllm_errors():
                await self.llm.engine_core.reset_prefix_cache_async(reset_running_requests=True)
            self._is_recording = True

    async def _call_workers(self, method: str, *args: object) -> Sequence[Any]:
        with _vllm_errors():
            answers: Sequence[Any] = await self.llm.collective_rpc(method, args=args)
        return answers

    def _labels(self, request_id: str, num_tokens: int) -> list[LabelSpan]:
        """Labels of the first tokens of a running request; vLLM gives them at its end only."""
        processor = self.llm.output_processor
        [internal_id] = processor.external_req_ids[request_id]
        starts = processor.request_states[internal_id].weight_version_starts
        ends = [start for _, start in starts[1:]] + [num_tokens]
        return [
            LabelSpan(label, start, min(end, num_tokens))
            for (label, start), end in zip(starts, ends, strict=True)
            if start < num_tokens
        ]

    @override
    async def drain(self) -> None:
        if self.options.pause != "Drain":
            return
        self._gate.clear()
        try:
            # vLLM has no event for the end of the last request; in a failed engine none ends.
            while self._unfinished() and not self.llm.errored:  # noqa: ASYNC110 - no event
                await asyncio.sleep(DRAIN_POLL_S)
        except BaseException:
            self._gate.set()
            raise

    @override
    async def freeze(self) -> None:
        # Not llm.pause_generation: it sleeps 20 ms after the pause, only to order its logs.
        with _vllm_errors():
            await self.llm.engine_core.pause_scheduler_async("keep", clear_cache=False)
            if self.options.pause == "Abort":
                await self.llm.abort(self._unfinished(), internal=True)

    def _unfinished(self) -> list[str]:
        return list(self.llm.output_processor.request_states)

    @override
    async def relabel(self, version: VersionId, *, drop_cache: bool) -> None:
        core = self.llm.engine_core
        with _vllm_errors():
            if drop_cache or self.options.recompute_kv or self.prefix_cache.mode == "Reset":
                # A reset skips blocks of running requests unless told to recompute them too.
                await core.reset_prefix_cache_async(reset_running_requests=True)
                self.prefix_cache.clear()
            await core.set_weight_version_async(str(version))
        self._label = version
        self.llm.salt = self.prefix_cache.admit(version).salt

    @override
    async def thaw(self) -> None:
        with _vllm_errors():
            await self.llm.engine_core.resume_scheduler_async()
        self._gate.set()

    @override
    async def set_speculation(self, *, is_on: bool) -> None:
        tokens = self.options.engine.speculative_tokens if is_on else 0
        with _vllm_errors():
            await self.llm.engine_core.call_utility_async(SET_SPECULATION, tokens)

    @override
    def read_counts(self) -> EngineCounts:
        return read_registry()

    def shutdown(self) -> None:
        """Stop forward passes and free the model."""
        self.llm.shutdown()


@contextlib.contextmanager
def _vllm_errors() -> Iterator[None]:
    """Translate vLLM's errors.

    Raises:
        UnavailableError: the engine failed.
    """
    try:
        yield
    except (EngineDeadError, EngineGenerateError) as cause:
        raise UnavailableError(f"the engine failed: {cause!r}") from cause


def _sampling_params(request: SampleRequest) -> SamplingParams:
    in_parts = request.stream or request.chunk_tokens
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        stop_token_ids=list(request.stop_token_ids),
        # Only the caller's stop tokens end a completion, not the model folder's.
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if in_parts else RequestOutputKind.FINAL_ONLY,
        stream_interval=None if request.stream else request.chunk_tokens or None,
        extra_args=None if request.routes_from is None else {ROUTES_FROM: request.routes_from},
    )


def _token_chunk(output: RequestOutput, admitted: VersionId | None) -> TokenChunk:
    completion = output.outputs[0]
    token_ids: Sequence[int] = completion.token_ids
    finish = None
    labels: list[LabelSpan] = []
    if output.finished:
        if completion.finish_reason not in _FINISH:
            raise UnavailableError(f"the engine aborted the request: {completion.finish_reason}")
        finish = _FINISH[completion.finish_reason]
        spans = completion.weight_versions or []
        labels = [LabelSpan(span.version, span.start, span.end) for span in spans]
    return TokenChunk(
        token_ids=token_ids,
        logprobs=completion.logprobs.logprobs if completion.logprobs is not None else [],
        finish=finish,
        labels=labels,
        admitted=admitted if finish else None,
    )


def engine_args(options: EngineOptions) -> Mapping[str, Any]:
    """The options as arguments of vLLM."""
    common = {
        "model": str(options.model),
        "served_model_name": [options.served_name],
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_concurrent,
        "max_num_batched_tokens": options.engine.max_batched_tokens,
        "enable_prefix_caching": True,
        # At temperature 0 these are the log-probs at temperature 1: greedy sampling has none.
        "logprobs_mode": "processed_logprobs",
        "load_format": "dummy" if options.follows_store else "auto",
        "weight_transfer_config": {"backend": BACKEND} if options.follows_store else None,
        "worker_extension_cls": WORKER_EXTENSION if options.follows_store else "",
        "disable_log_stats": False,
        # Requests without a seed must differ after a restart and between replicas.
        "seed": secrets.randbelow(2**31),
    }
    common |= engine_arguments.read_settings(options.engine)
    common |= engine_arguments.read_speculation(
        options.engine, options.model, max_requests=options.max_concurrent
    )
    common |= engine_arguments.read_positions(options.model, options.context_extension)
    if options.gpus == 0:
        return common | {
            "enforce_eager": True,
            "kv_cache_memory_bytes": options.kv_cache_bytes,
            "block_size": CPU_BLOCK_SIZE,
        }
    return common | engine_arguments.read_parallelism(options.engine, options.gpus)


def build_replica(options: EngineOptions) -> Replica:
    """Build the engine; takes seconds. Set the options' environment before.

    Raises:
        UserError: vLLM refuses the model, an option, or an argument in engineArgs.
    """
    engine_arguments.check_arguments(options.engine.engine_args, AsyncEngineArgs)
    place = threaded_core() if options.gpus == 0 else contextlib.nullcontext()
    try:
        args = AsyncEngineArgs(**engine_args(options))
        config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        with place:
            llm = _GatedLLM.from_vllm_config(config)
    except ValueError as cause:
        raise UserError(_refusal(options, cause)) from cause
    return Replica(llm, options)


def _refusal(options: EngineOptions, cause: ValueError) -> Problem:
    words = str(cause)
    # pydantic puts the reason between a heading and all of its input.
    reason = words.partition("Value error, ")[2] or words
    return Problem(
        reason="EngineRefused",
        what=f"vLLM refuses it: {reason.partition(' [type=')[0][:500]}",
        where=str(options.model),
        fix="serve a model that vLLM knows, with a length and a KV cache that fit it",
    )

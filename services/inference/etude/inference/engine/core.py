"""vLLM's engine core on a thread of this process, behind its asynchronous client.

vLLM runs the asynchronous engine in a process of its own, which imports everything again and
copies every request and token through a socket. On CPU that costs 13 CPU-seconds at start, 0.9 GB
and a tenth of the throughput, and buys nothing: the forward pass releases the interpreter lock.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from typing_extensions import override
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

log = logging.getLogger(__name__)

Call = Callable[[], None]


@dataclass(slots=True)
class _CoreHealth:
    """Read by vLLM's front end before each request."""

    engine_dead: bool = False


class ThreadedCore(EngineCoreClient):  # type: ignore[misc]  # mypy does not follow vLLM
    """Runs forward passes while there are requests; calls run between two passes, in order."""

    engine_ranks_managed = (0,)

    def __init__(self, config: VllmConfig, executor: type[Executor], *, log_stats: bool) -> None:
        self.resources = _CoreHealth()
        self._core = EngineCore(config, executor, log_stats)
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._outputs: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)

    def _start_once(self) -> asyncio.AbstractEventLoop:
        """The event loop that uses this core; the first call starts the thread."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._thread.start()
        return self._loop

    def _run(self) -> None:
        try:
            while self._serve_calls():
                outputs, executed = self._core.step_fn()
                self._core.post_step(executed)
                for output in (outputs or {}).values():
                    self._emit(output)
        except Exception:  # top of the thread: any error ends the engine
            log.exception("the engine's forward pass failed")
            self.resources.engine_dead = True
            self._emit(EngineDeadError())

    def _serve_calls(self) -> bool:
        """Run waiting calls, and wait for one while there is nothing to step.

        Returns:
            False once the core is shut down.
        """
        while True:
            idle = not self._core.scheduler.has_requests()
            try:
                call = self._calls.get(block=idle)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()

    def _emit(self, item: EngineCoreOutputs | Exception) -> None:
        self._post_to_loop(self._outputs.put_nowait, item)

    def _post_to_loop(self, callback: Callable[..., object], *args: object) -> None:
        assert self._loop is not None  # noqa: S101 - the thread runs only once it is set
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *args)

    async def _call(self, function: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401 - vLLM's calls answer anything
        loop = self._start_once()
        if self.resources.engine_dead:
            raise EngineDeadError
        answer: asyncio.Future[Any] = loop.create_future()

        def call() -> None:
            try:
                result = function(*args)
            except Exception as error:  # noqa: BLE001 - handed to the caller
                self._post_to_loop(_resolve_future, answer, None, error)
            else:
                self._post_to_loop(_resolve_future, answer, result, None)

        self._calls.put(call)
        return await answer

    @override
    async def get_output_async(self) -> EngineCoreOutputs:
        self._start_once()
        item = await self._outputs.get()
        if isinstance(item, Exception):
            raise item
        return item

    @override
    async def add_request_async(self, request: EngineCoreRequest) -> None:
        # Not awaited: a caller cancelled here would leave a request that is never aborted.
        self._start_once()
        self._calls.put(lambda: self._add(request))

    def _add(self, request: EngineCoreRequest) -> None:
        try:
            self._core.add_request(*self._core.preprocess_add_request(request))
        except Exception:  # one bad request must not end the engine
            log.exception("request %s was refused", request.request_id)
            refused = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR)
            outputs = EngineCoreOutputs(outputs=[refused], finished_requests={request.request_id})
            self._emit(outputs)

    @override
    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids:
            self._start_once()
            self._calls.put(lambda: self._core.abort_requests(request_ids))

    @override
    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        tasks: tuple[str, ...] = self._core.get_supported_tasks()
        return tasks

    @override
    async def pause_scheduler_async(self, mode: str = "abort", clear_cache: bool = True) -> None:
        await self._call(self._core.pause_scheduler, mode, clear_cache)

    @override
    async def resume_scheduler_async(self) -> None:
        await self._call(self._core.resume_scheduler)

    @override
    async def is_scheduler_paused_async(self) -> bool:
        paused: bool = await self._call(self._core.is_scheduler_paused)
        return paused

    @override
    async def set_weight_version_async(self, weight_version: str) -> None:
        await self._call(self._core.set_weight_version, weight_version)

    @override
    async def get_weight_version_async(self) -> str:
        version: str = await self._call(self._core.get_weight_version)
        return version

    @override
    async def reset_mm_cache_async(self) -> None:
        await self._call(self._core.reset_mm_cache)

    @override
    async def reset_prefix_cache_async(
        self,
        reset_running_requests: bool = False,
        reset_connector: bool = False,
    ) -> bool:
        done: bool = await self._call(
            self._core.reset_prefix_cache, reset_running_requests, reset_connector
        )
        return done

    @override
    async def collective_rpc_async(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        results: list[Any] = await self._call(
            self._core.collective_rpc, method, timeout, args, kwargs
        )
        return results

    async def call_utility_async(self, method: str, *args: object) -> Any:  # noqa: ANN401 - vLLM's calls answer anything
        """Call a method of the core, as vLLM's client of a process of its own can."""
        return await self._call(getattr(self._core, method), *args)

    @override
    def dp_engines_running(self) -> bool:
        return False

    @override
    def shutdown(self, timeout: float | None = None) -> None:
        """End the thread after its step, then free the model."""
        self._calls.put(None)
        if self._loop is not None:
            self._thread.join(timeout=30)
        self._core.shutdown()


def _resolve_future(answer: "asyncio.Future[Any]", result: object, error: Exception | None) -> None:
    if answer.cancelled():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)


@contextlib.contextmanager
def threaded_core() -> Iterator[None]:
    """An asynchronous engine built in the block gets its core on a thread.

    vLLM offers no way to name the client, so its factory is replaced for the moment.
    """

    def make(
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,  # noqa: FBT001 - vLLM's signature
        **_: object,
    ) -> ThreadedCore:
        return ThreadedCore(vllm_config, executor_class, log_stats=log_stats)

    original = EngineCoreClient.make_async_mp_client
    EngineCoreClient.make_async_mp_client = staticmethod(make)
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = staticmethod(original)

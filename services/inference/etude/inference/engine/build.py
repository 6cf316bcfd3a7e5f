"""Engine construction on a thread: it takes many seconds and cannot be interrupted."""

import asyncio
import concurrent.futures
import multiprocessing
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from etude.inference.settings import EngineOptions

if TYPE_CHECKING:
    from etude.inference.engine.replica import Replica


async def build_engine(options: EngineOptions, stop: asyncio.Event) -> "Replica | None":
    """Import vLLM and build the engine, on a thread so that probes and signals are answered.

    Returns:
        None if stopped meanwhile; the thread runs on, so call `exit_process` then.

    Raises:
        UserError: vLLM cannot serve the requested model.
    """
    # Here and not in a main module: two programs build engines, and it must precede the import.
    os.environ.update(options.environment())
    outcome: concurrent.futures.Future[Replica] = concurrent.futures.Future()

    def build() -> None:
        try:
            from etude.inference.engine import replica  # noqa: PLC0415 - vLLM is heavy

            outcome.set_result(replica.build_replica(options))
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            outcome.set_exception(error)

    # Not asyncio's pool, which the event loop waits for when it ends.
    threading.Thread(target=build, name="build-engine", daemon=True).start()
    built = asyncio.wrap_future(outcome)
    stopping = asyncio.create_task(stop.wait(), name="stop")
    either: set[asyncio.Future[Any]] = {built, stopping}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    return None if stop.is_set() else await built


def exit_process(code: int = 0) -> NoReturn:
    """Exit immediately, after everything that matters is closed.

    Python would wait for threads that build, fetch or step, or tear down what they use.
    """
    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

"""Trainer process: settings, inputs, Ray, and the controller that serves the run."""

import asyncio
import os
import sys
from collections.abc import Callable
from typing import TypeVar

from etude.common import process
from etude.common.errors import EtudeError, UserError
from etude.common.probes import Probes
from etude.common.role_inputs import read_run
from etude.trainer.exit_codes import exit_code
from etude.trainer.settings import WORKER_ENV, Settings

T = TypeVar("T")

_PROGRAM = "etude-trainer"


def main() -> None:
    """Run the trainer until it is told to stop."""
    process.start_process()
    settings = process.read_settings(_PROGRAM, Settings.from_env)
    try:
        code = _run(settings)
    except UserError as error:
        process.exit_with(_PROGRAM, str(error), process.EXIT_CONFIGURATION)
    except (EtudeError, OSError) as error:
        process.exit_with(_PROGRAM, f"{type(error).__name__}: {error}", exit_code(error))
    sys.exit(code)


async def _answering_probes(settings: Settings, work: Callable[[], T]) -> T:
    """Do some work in a thread, alive for the kubelet: a model is copied for many minutes."""
    probes = Probes(settings.probe_port, settings.host)
    await probes.start()
    try:
        return await asyncio.to_thread(work)
    finally:
        await probes.stop()


def _run(settings: Settings) -> int:
    resolved = read_run(settings.run_file)
    try:
        settings.check(resolved.spec)
    except ValueError as error:
        process.exit_with(_PROGRAM, str(error), process.EXIT_CONFIGURATION)
    from etude.trainer.controller.inputs import find_inputs

    inputs = asyncio.run(_answering_probes(settings, lambda: find_inputs(resolved, settings)))
    # Ray's processes inherit these before they load torch, or get them from the cluster.
    for name, value in WORKER_ENV.items():
        os.environ.setdefault(name, value)
    # Below `uv run` Ray would pack the current folder and start each worker by uv inside the copy.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    from etude.trainer import ray_backend
    from etude.trainer.controller.lifecycle import serve

    ray_backend.start_ray(settings.ray_address, {name: os.environ[name] for name in WORKER_ENV})
    try:
        return asyncio.run(serve(settings, resolved, inputs))
    finally:
        ray_backend.stop_ray()

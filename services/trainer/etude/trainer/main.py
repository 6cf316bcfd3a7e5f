"""The trainer's process: settings, inputs, Ray, and the controller that serves the run."""

import asyncio
import logging
import os
import sys
from typing import NoReturn

from etude.common.errors import EtudeError, UserError
from etude.common.process import end_at_once_when_told
from etude.common.role_inputs import read_run
from etude.trainer.exit_codes import exit_code
from etude.trainer.settings import Settings

EXIT_CONFIGURATION = 78
"""EX_CONFIG of sysexits.h: a restart would not help."""


def main() -> None:
    """Run the trainer until it is told to stop."""
    end_at_once_when_told()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = Settings.from_env()
    except KeyError as error:
        _end(f"{error.args[0]} is not set", code=EXIT_CONFIGURATION)
    except ValueError as error:
        _end(str(error), code=EXIT_CONFIGURATION)
    try:
        code = _run(settings)
    except UserError as error:
        _end(str(error), code=EXIT_CONFIGURATION)
    except (EtudeError, OSError) as error:
        _end(f"{type(error).__name__}: {error}", code=exit_code(error))
    sys.exit(code)


def _run(settings: Settings) -> int:
    resolved = read_run(settings.run_file)
    try:
        settings.check(resolved.spec)
    except ValueError as error:
        _end(str(error), code=EXIT_CONFIGURATION)
    from etude.trainer.controller.inputs import find_inputs

    inputs = find_inputs(resolved, settings)
    # Ray's processes inherit these before they load torch. Threads that spin for long starve busy
    # cores (2 x the CPU seconds); those that sleep at once wake too late for small operations. A
    # thousand turns: a step of the demo takes 0.129 s instead of 0.156 on idle cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Below `uv run` Ray would pack the current folder and start each worker by uv inside the copy.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    from etude.trainer import ray_backend
    from etude.trainer.controller.lifecycle import serve

    ray_backend.start(settings.ray_address)
    try:
        return asyncio.run(serve(settings, resolved, inputs))
    finally:
        ray_backend.stop()


def _end(what: str, *, code: int) -> NoReturn:
    sys.stderr.write(f"etude-trainer: {what}\n")
    sys.exit(code)

"""The trainer's process: settings, inputs, Ray, and the controller that serves the run."""

import asyncio
import logging
import os
import sys
from typing import NoReturn

from etude.common.errors import UserError
from etude.common.files import read_run
from etude.trainer.settings import Settings

EXIT_CONFIGURATION = 78
"""EX_CONFIG of sysexits.h: a restart would not help."""


def main() -> None:
    """Run the trainer until it is told to stop."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = Settings.from_env()
        resolved = read_run(settings.run_file)
        settings.check(resolved.spec)
        from etude.trainer.controller.inputs import find_inputs

        inputs = find_inputs(resolved, settings)
    except KeyError as error:
        _give_up(f"{error.args[0]} is not set")
    except (ValueError, UserError) as error:
        _give_up(str(error))
    # Two threads on busy cores would spin; Ray's processes inherit this before they load torch.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Below `uv run` Ray would pack the current folder and start each worker by uv inside the copy.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    from etude.trainer import cluster
    from etude.trainer.controller.host import serve

    cluster.start(settings.ray_address)
    try:
        code = asyncio.run(serve(settings, resolved, inputs))
    except OSError as error:
        sys.stderr.write(f"etude-trainer: {error}\n")
        code = 1
    finally:
        cluster.stop()
    sys.exit(code)


def _give_up(what: str) -> NoReturn:
    sys.stderr.write(f"etude-trainer: {what}\n")
    sys.exit(EXIT_CONFIGURATION)

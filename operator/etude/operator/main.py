"""The operator of a cluster: reads its settings and serves."""

import asyncio
import logging
import sys
from collections.abc import Coroutine, Iterator

from etude.common.errors import EtudeError
from etude.common.process import end_at_once_when_told
from etude.operator.settings import Settings

EXIT_CONFIGURATION = 78


def main() -> None:
    """Run the operator until SIGTERM."""
    end_at_once_when_told()  # a SIGTERM during startup must not wait for the grace period
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = Settings.from_env()
    except KeyError as error:
        sys.stderr.write(f"etude-operator: {error.args[0]} is not set\n")
        sys.exit(EXIT_CONFIGURATION)
    except ValueError as error:
        sys.stderr.write(f"etude-operator: {error}\n")
        sys.exit(EXIT_CONFIGURATION)
    from etude.operator.service import serve  # kopf and the API client arrive here

    sys.exit(run(serve(settings)))


def run(serving: Coroutine[None, None, None]) -> int:
    """Serve until the end; returns the exit code. Known errors print one line."""
    code = 0
    try:
        asyncio.run(serving)
    except* EtudeError as caught:  # a task group wraps errors of its tasks
        code = 1
        for error in _each(caught):
            sys.stderr.write(f"etude-operator: {error}\n")
    return code


def _each(caught: BaseExceptionGroup[EtudeError]) -> Iterator[EtudeError]:
    for error in caught.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _each(error)
        else:
            yield error

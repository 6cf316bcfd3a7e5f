"""Start of the operator's and the issuer's processes: early SIGTERM, logging, settings."""

import logging
import sys
from collections.abc import Callable
from typing import TypeVar

from etude.common.process import end_at_once_when_told

S = TypeVar("S")

EXIT_CONFIGURATION = 78


def load_settings(program: str, read: Callable[[], S]) -> S:
    """Prepare the process and read its settings; exits with 78 if one is missing or wrong."""
    end_at_once_when_told()  # a SIGTERM during startup must not wait for the grace period
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        return read()
    except KeyError as error:
        message = f"{error.args[0]} is not set"
    except ValueError as error:
        message = str(error)
    sys.stderr.write(f"{program}: {message}\n")
    sys.exit(EXIT_CONFIGURATION)

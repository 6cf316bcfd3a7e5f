"""The operator of a cluster: reads its settings and serves."""

import asyncio
import logging
import sys

from etude.common.errors import EtudeError
from etude.operator.settings import Settings

EXIT_CONFIGURATION = 78


def main() -> None:
    """Run the operator until it is told to stop."""
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

    try:
        asyncio.run(serve(settings))
    except EtudeError as error:
        sys.stderr.write(f"etude-operator: {error}\n")
        sys.exit(1)

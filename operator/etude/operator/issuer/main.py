"""Entry point of the issuer: `python -m etude.operator.issuer.main`."""

import asyncio
import sys

from etude.common.errors import UserError
from etude.operator.issuer.settings import Settings
from etude.operator.startup import EXIT_CONFIGURATION, load_settings


def main() -> None:
    """Sign certificates until SIGTERM."""
    settings = load_settings("etude-issuer", Settings.from_env)
    from etude.operator.issuer.server import serve  # the API client arrives here

    try:
        asyncio.run(serve(settings))
    except UserError as error:
        sys.stderr.write(f"etude-issuer: {error}\n")
        sys.exit(EXIT_CONFIGURATION)


if __name__ == "__main__":
    main()

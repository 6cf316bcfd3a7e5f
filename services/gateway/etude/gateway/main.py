"""`etude-gateway`: serve a route; `etude-gateway key USER SCOPES`: make an API key."""

import sys

from etude.common import process
from etude.common.errors import UserError
from etude.gateway.settings import Settings, read_route

PROGRAM = "etude-gateway"
_USAGE = 2


def main() -> None:
    """Serve until SIGTERM, or make a key: its line goes to stdout, the key to stderr."""
    match sys.argv[1:]:
        case []:
            _serve()
        case ["key", user, scopes]:
            _print_key(user, scopes)
        case _:
            process.exit_with(PROGRAM, "use: etude-gateway [key USER serve,feedback,admin]", _USAGE)


def _serve() -> None:
    process.start_process()
    settings = process.read_settings(PROGRAM, Settings.from_env)
    try:
        route = read_route(settings.route_file)
    except UserError as error:
        process.exit_with(PROGRAM, str(error), process.EXIT_CONFIGURATION)
    import uvloop

    from etude.common import telemetry
    from etude.gateway import server

    provider = telemetry.setup_tracing(
        PROGRAM, otlp_endpoint=None, traces_file=settings.traces_file
    )
    # A continued turn takes 4.3 ms of CPU on it, and 5.4 ms on asyncio's own loop; streamed ones
    # take the same (bench/gateway.py, two runs of each).
    process.run_service(PROGRAM, server.serve(route, settings), make_loop=uvloop.new_event_loop)
    provider.shutdown()


def _print_key(user: str, scopes: str) -> None:
    from etude.common import api_keys

    try:
        key, line = api_keys.make_key(user, scopes)
    except UserError as error:
        process.exit_with(PROGRAM, str(error), _USAGE)
    sys.stdout.write(f"{line}\n")
    sys.stderr.write(f"{key}\n")


if __name__ == "__main__":
    main()

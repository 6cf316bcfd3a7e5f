"""Entry point of a pool's processes: broker, node (a host), supervise, edge, code search."""

import sys
from collections.abc import Coroutine

from etude.common import process
from etude.envserver.settings import BrokerSettings, HostSettings

_USAGE = "usage: etude-envserver broker|node|supervise|edge|search, or key NAME full|tools"


def main() -> None:
    """Run the role that the first argument names."""
    process.set_up_logging()
    work = process.read_settings("etude-envserver", lambda: _role(sys.argv[1:]))
    process.run_service("etude-envserver", work)


def _role(arguments: list[str]) -> Coroutine[None, None, None]:
    match arguments:
        case ["broker"]:
            broker_settings = BrokerSettings.from_env()
            from etude.envserver.broker.server import serve as serve_broker

            return serve_broker(broker_settings)
        case ["node"]:
            node_settings = HostSettings.from_env()
            from etude.envserver.host.server import serve as serve_node

            return serve_node(node_settings)
        case ["supervise"]:
            from etude.envserver.host_supervisor import main as supervise

            return supervise()
        case ["edge"]:
            from etude.envserver.environment_api.settings import EnvironmentApiSettings

            edge_settings = EnvironmentApiSettings.from_env()
            from etude.envserver.environment_api.server import serve as serve_edge

            return serve_edge(edge_settings)
        case ["search"]:
            from etude.envserver.code_search.settings import CodeSearchSettings

            search_settings = CodeSearchSettings.from_env()
            from etude.envserver.code_search.server import serve as serve_search

            return serve_search(search_settings)
        case ["key", name, "full" | "tools" as role]:
            from etude.envserver.environment_api import api_keys

            key, line = api_keys.make_key(name, api_keys.KeyRole(role))
            sys.stdout.write(f"{line}\n")
            sys.stderr.write(f"{key}\n")
            sys.exit(0)
        case ["-h" | "--help"]:
            sys.stdout.write(f"{_USAGE}\n")
            sys.exit(0)
        case _:
            raise ValueError(_USAGE)


if __name__ == "__main__":
    main()

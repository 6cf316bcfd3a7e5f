"""Entry point of the feedback service: serve, audit, make an API key, or relay events."""

import sys
from collections.abc import Coroutine

from etude.common import process
from etude.feedback.settings import Settings

_USAGE = (
    "usage: etude-feedback [serve], or audit, or key USER SCOPES,"
    " or relay from-nats | to-nats | from-kafka | to-kafka"
)


def main() -> None:
    """Serve until SIGTERM, or run the command that the first argument names."""
    process.start_process()
    work = process.read_settings("etude-feedback", lambda: _command(sys.argv[1:]))
    process.run_service("etude-feedback", work)


def _command(arguments: list[str]) -> Coroutine[None, None, None]:
    match arguments:
        case [] | ["serve"]:
            settings = Settings.from_env()
            from etude.feedback.service import serve

            return serve(settings)
        case ["audit"]:
            audit_settings = Settings.from_env()
            from etude.feedback.commands.audit import audit

            return audit(audit_settings)
        case ["relay", "from-nats" | "to-nats" | "from-kafka" | "to-kafka" as direction]:
            return _relay(*direction.split("-"))
        case ["key", user, scopes]:
            from etude.common import api_keys
            from etude.common.errors import UserError

            try:
                key, line = api_keys.make_key(user, scopes)
            except UserError as error:
                process.exit_with("etude-feedback", str(error), process.EXIT_CONFIGURATION)
            sys.stdout.write(f"{line}\n")
            sys.stderr.write(f"{key}\n")
            sys.exit(0)
        case ["-h" | "--help"]:
            sys.stdout.write(f"{_USAGE}\n")
            sys.exit(0)
        case _:
            raise ValueError(_USAGE)


def _relay(way: str, kind: str) -> Coroutine[None, None, None]:
    from etude.feedback.relays.command import RelaySettings, run_relay
    from etude.feedback.relays.event_places import EventPlace

    place: EventPlace
    try:
        if kind == "nats":
            from etude.feedback.relays.nats_streams import NatsSettings

            place = NatsSettings.from_env()
        else:
            from etude.feedback.relays.kafka_topics import KafkaSettings

            place = KafkaSettings.from_env()
    except ModuleNotFoundError as error:
        hint = f"{error.name} is not installed: pip install 'etude[feedback,{kind}]'"
        process.exit_with("etude-feedback", hint, process.EXIT_CONFIGURATION)
    return run_relay(RelaySettings.from_env(), place, is_incoming=way == "from")


if __name__ == "__main__":
    main()

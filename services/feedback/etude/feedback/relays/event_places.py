"""Places that relays take events from and put them, as the environment names them."""

from typing import Protocol

from etude.feedback.relays.incoming import EventQueue
from etude.feedback.relays.outgoing import EventLog


class EventPlace(Protocol):
    """Settings of a queue and of a log.

    Raises:
        UserError: by each method, if there is no such place.
    """

    async def open_queue(self) -> EventQueue: ...

    async def open_log(self) -> EventLog: ...


def is_local(host: str) -> bool:
    """Return true for a host by which only this machine is reached."""
    return host in {"127.0.0.1", "[::1]", "::1", "localhost"}

"""Egress listener of a guest: connections over the agent's channel, served by the proxy."""

import asyncio
import logging

from etude.envserver.egress.environment_egress import EnvironmentEgress
from etude.envserver.egress.proxy import serve_connection
from etude.envserver.egress.proxy_variables import PORT
from etude.envserver.guest.channel import GuestChannel, GuestLostError
from etude.envserver.guest.connections import GuestConnection, PortTakenError

log = logging.getLogger(__name__)

_AGAIN_S = 1.0
"""Delay before asking a guest again whose port is in use."""


class GuestEgressListener:
    """The proxy port of one guest, for as long as its channel is not lost or reset."""

    def __init__(self, channel: GuestChannel, egress: EnvironmentEgress) -> None:
        """Begin to accept connections.

        Args:
            channel: to a guest that is synchronised: it knows the channel's token.
            egress: of its environment.
        """
        self._channel = channel
        self._egress = egress
        self._serving: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._accept(), name=f"egress {egress.lease_id}")

    def close(self) -> None:
        """Stop serving: open connections are cut."""
        self._task.cancel()
        for task in self._serving:
            task.cancel()

    async def _accept(self) -> None:
        places = self._egress.connection_slots
        told = False
        while True:
            await places.acquire()
            try:
                connection = await self._channel.accept(PORT)
            except PortTakenError as error:
                places.release()
                if not told:
                    log.warning(
                        "environment %s has no egress: %r; if its image is older than this host,"
                        " build it again",
                        self._egress.lease_id,
                        str(error),
                    )
                told = True
                await asyncio.sleep(_AGAIN_S)
                continue
            except GuestLostError:
                places.release()
                return
            except BaseException:
                places.release()
                raise
            self._begin(connection)

    def _begin(self, connection: GuestConnection) -> None:
        task = asyncio.create_task(
            serve_connection(connection, self._egress), name="egress connection"
        )
        self._serving.add(task)
        task.add_done_callback(self._on_served)

    def _on_served(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        self._egress.connection_slots.release()

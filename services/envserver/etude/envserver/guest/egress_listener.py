"""Connections that a guest's agent hands over its channel, each served by the proxy."""

import asyncio
import logging

from etude.envserver.egress.environment_egress import Gate
from etude.envserver.egress.proxy import serve
from etude.envserver.egress.proxy_variables import PORT
from etude.envserver.guest.channel import GuestChannel, GuestLostError
from etude.envserver.guest.connections import GuestConnection, PortTakenError

log = logging.getLogger(__name__)

_AGAIN_S = 1.0
"""Until a guest is asked again whose port somebody else has."""


class GuestDoor:
    """The port of one guest, for as long as its channel is not lost or reset."""

    def __init__(self, channel: GuestChannel, gate: Gate) -> None:
        """Begin to take connections.

        Args:
            channel: to a guest that has become itself: it knows the channel's token.
            gate: of its environment.
        """
        self._channel = channel
        self._gate = gate
        self._serving: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._accept(), name=f"egress {gate.lease_id}")

    def close(self) -> None:
        """Serve no more: connections end in the middle."""
        self._task.cancel()
        for task in self._serving:
            task.cancel()

    async def _accept(self) -> None:
        places = self._gate.places
        told = False
        while True:
            await places.acquire()
            try:
                connection = await self._channel.accept(PORT)
            except PortTakenError as error:
                places.release()
                if not told:
                    log.warning(
                        "environment %s has no way out: %r; if its image is older than this node,"
                        " build it again",
                        self._gate.lease_id,
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
        task = asyncio.create_task(serve(connection, self._gate), name="egress connection")
        self._serving.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        self._gate.places.release()

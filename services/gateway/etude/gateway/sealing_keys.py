"""Keys under which this process seals the turns of users, asked for at the feedback service."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc

from etude.common.api_keys import KeyOwner
from etude.common.turns.turn_sealing import TurnKey, TurnSealer
from etude.v1 import turns_pb2, turns_pb2_grpc

log = logging.getLogger(__name__)

MAX_AGE_S = 300.0
"""A user who was erased has another key after so long; turns sealed until then nobody reads."""
_DEADLINE_S = 5.0
_RETRY_S = 5.0
"""Time without questions after a failed one."""
_AWAY = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
_CACHED = 50_000
"""Users whose keys are in memory: 20 MB."""

_User = tuple[str, str]


class _Entry(NamedTuple):
    sealer: TurnSealer
    asked_s: float


@dataclass(slots=True)
class SealingKeys:
    """Sealers of users. Belongs to the event loop."""

    stub: "turns_pb2_grpc.TurnKeyServiceAsyncStub"
    now_s: Callable[[], float] = time.monotonic
    _entries: "OrderedDict[_User, _Entry]" = field(default_factory=OrderedDict)
    _asking: dict[_User, "asyncio.Task[None]"] = field(default_factory=dict)
    _away_until_s: float = 0.0

    def request(self, user: KeyOwner) -> None:
        """Ask for the key of a user, unless it is known and fresh; does not wait.

        Asked again at half its age, so that it does not expire while a turn is sampled.
        """
        name = (user.tenant, user.user)
        if not self._is_younger(name, MAX_AGE_S / 2) and name not in self._asking:
            if self.now_s() < self._away_until_s:
                return
            task = self._asking[name] = asyncio.create_task(self._ask(name))
            task.add_done_callback(lambda _: self._asking.pop(name, None))

    async def wait(self, user: KeyOwner) -> None:
        """Wait for the answer about a user's key, which may have expired since it was asked for."""
        if self.find(user) is not None:
            return
        self.request(user)
        task = self._asking.get((user.tenant, user.user))
        if task is not None:
            await asyncio.wait([task])

    def find(self, user: KeyOwner) -> TurnSealer | None:
        """Sealer of a user, if the key is known."""
        name = (user.tenant, user.user)
        if not self._is_younger(name, MAX_AGE_S):
            return None
        return self._entries[name].sealer

    def _is_younger(self, name: _User, age_s: float) -> bool:
        entry = self._entries.get(name)
        return entry is not None and self.now_s() - entry.asked_s <= age_s

    async def _ask(self, name: _User) -> None:
        tenant, user = name
        asked_s = self.now_s()
        try:
            answer = await self.stub.GetTurnKey(
                turns_pb2.GetTurnKeyRequest(tenant=tenant, user=user), timeout=_DEADLINE_S
            )
            key = TurnKey(answer.user_digest, answer.key_generation, answer.public_key)
            sealer = TurnSealer.make(key)
        except (grpc.aio.AioRpcError, ValueError) as error:
            if self._away_until_s <= asked_s:
                log.warning("turns are not recorded, as no key seals them: %s", error)
            # An answer about one user says nothing about others.
            if isinstance(error, grpc.aio.AioRpcError) and error.code() in _AWAY:
                self._away_until_s = self.now_s() + _RETRY_S
            return
        self._entries[name] = _Entry(sealer, asked_s)
        self._entries.move_to_end(name)
        self._drop_old()

    def _drop_old(self) -> None:
        """Forget keys that are too old, and the oldest of too many: a data key opens, too."""
        while self._entries:
            oldest = next(iter(self._entries))
            if len(self._entries) <= _CACHED and self._is_younger(oldest, MAX_AGE_S):
                return
            del self._entries[oldest]

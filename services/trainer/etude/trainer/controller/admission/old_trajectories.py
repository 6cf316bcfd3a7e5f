"""Trajectory logs from before a phase began here, deleted once no group goes on from them."""

import asyncio
import logging
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Self

from etude.common.blobs import Store
from etude.common.errors import StoreError
from etude.trainer.rollouts.trajectories.log import TRAJECTORIES

log = logging.getLogger(__name__)


@dataclass(slots=True)
class OldTrajectories:
    """Segments that workers left before, among them those of workers that died."""

    store: Store
    _keys: list[str] = field(default_factory=list)
    _groups: set[str] = field(default_factory=set)
    """Groups that may go on from them."""

    @classmethod
    async def find(cls, store: Store, groups: Iterable[str]) -> Self:
        """Find the segments, of which these groups may need some; none if the store is away."""
        try:
            keys = await asyncio.to_thread(lambda: [i.key for i in store.list(TRAJECTORIES)])
        except StoreError as error:
            log.info("old trajectories stay: %s", error)
            keys = []
        return cls(store, keys, set(groups))

    async def delete_unneeded(self, live: Container[str]) -> None:
        """Delete them once none of their groups is live: what goes on was recorded again."""
        self._groups = {each for each in self._groups if each in live}
        if self._groups or not self._keys:
            return
        try:
            await asyncio.to_thread(self.store.delete, self._keys)
        except StoreError as error:
            log.info("old trajectories stay for now: %s", error)
        else:
            self._keys = []

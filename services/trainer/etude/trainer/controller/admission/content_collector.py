"""Collector of objects that workers wrote for rollouts which the journal does not know.

A worker that dies after it wrote tokens and before it handed its group over leaves them. The group
is run again, and its records name other objects, or the same. A rollout that was dropped may come
back when the run is restored to an older checkpoint: what the journal ever named stays.
"""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from etude.common.blobs import MissingError, Store
from etude.common.errors import CorruptError, StoreError
from etude.common.routed_experts import ROUTES
from etude.trainer.contents.objects import group_prefix, list_objects, read_links
from etude.trainer.controller.admission.groups import RolloutGroup
from etude.trainer.controller.journal.write_ahead_log import Journal
from etude.v1 import journal_pb2

log = logging.getLogger(__name__)

Records = Iterable[journal_pb2.JournalRollout]


@dataclass(slots=True)
class ContentCollector:
    """Deletes what is left of earlier attempts at a group, once all of its rollouts are known."""

    store: Store
    journal: Journal
    is_restored: bool
    """True if the run was restored to a checkpoint: groups have records that it left then."""
    _repeated: set[str] = field(default_factory=set)

    def note_repeated(self, group_id: str) -> None:
        """Take note that an earlier worker had started a group."""
        self._repeated.add(group_id)

    async def collect(self, group: RolloutGroup, *, after: int) -> None:
        """Delete objects of a group that no record names, if an earlier worker had started it.

        Args:
            group: whose rollouts are all known.
            after: number of its last record. Nothing is deleted before that is durable: a
                successor may have run the group again, and then it never will be.
        """
        if group.group_id not in self._repeated:
            return
        self._repeated.discard(group.group_id)
        if self.is_restored:
            return
        records, spent = tuple(group.finished.values()), frozenset(group.spent)
        await self.journal.wait_durable(after)
        try:
            if await asyncio.to_thread(self.journal.is_fenced):
                return
            await asyncio.to_thread(self._delete_unnamed, group.group_id, records, spent)
            await asyncio.to_thread(self._delete_routes, group.group_id, records, spent)
        except (StoreError, MissingError, CorruptError) as error:
            log.info("unnamed contents of %s stay: %s", group.group_id, error)

    def _delete_unnamed(self, group_id: str, records: Records, spent: Iterable[str]) -> None:
        named = {found.key for record in records for found in list_objects(record.content)}
        prefix = group_prefix(group_id)
        keys = [info.key for info in self.store.list(prefix)]
        dropped = tuple(f"{prefix}{rollout_id}." for rollout_id in spent)
        self.store.delete([k for k in keys if k not in named and not k.startswith(dropped)])

    def _delete_routes(self, group_id: str, records: Records, spent: Iterable[str]) -> None:
        """Delete recorded experts that no link of the group names.

        Raises:
            CorruptError: the links of a rollout are damaged.
            MissingError: they are gone.
            StoreError: the store does not answer.
        """
        prefix = f"{ROUTES}{group_id}/"
        keys = [info.key for info in self.store.list(prefix)]
        if not keys:
            return
        named: set[str] = set()
        for record in records:
            rollout = record.rollout
            if record.HasField("content"):
                rollout = read_links(self.store, record.content, rollout.rollout_id)
            named.update(link.routes.key for link in rollout.links)
        dropped = tuple(f"{prefix}{rollout_id}." for rollout_id in spent)
        self.store.delete([k for k in keys if k not in named and not k.startswith(dropped)])

"""Writer of the contents of finished rollouts: they are durable before the controller hears."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from etude.common.blobs import Store, is_unavailable
from etude.common.errors import InvalidFieldError, StoreError
from etude.common.store_retry import StoreRetry
from etude.trainer.contents.call_figures import measure_calls
from etude.trainer.contents.objects import (
    MAX_CONTENT_BYTES,
    group_prefix,
    write_calls,
    write_links,
)
from etude.trainer.contents.rollout_checks import InvalidSpanError, check_rollout
from etude.trainer.rollouts.protocol import GroupRequest
from etude.trainer.rollouts.scoring import mask_rollout
from etude.trainer.routing.table import Purpose
from etude.v1 import journal_pb2

NOT_STORED = "TokensNotStored"
"""Reason of the fault of a rollout whose tokens the store refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentWriter:
    """Moves links and calls of finished rollouts from their records to the run's store."""

    store: Store
    vocab_size: int

    async def write(
        self, order: GroupRequest, records: Iterable[journal_pb2.JournalRollout]
    ) -> int:
        """Write the links of these rollouts; one that cannot be trained on is masked.

        Without the store no rollout counts: while it is away, writes are repeated without limit, as
        those of the journal. One that the store refuses would be refused again: its rollout is
        masked.

        Returns:
            Number of repeated writes.
        """
        retry = StoreRetry(is_repeated=is_unavailable)
        await asyncio.gather(
            *(self._write_one(order, record, retry) for record in records if record.rollout.links)
        )
        return retry.num_repeats

    async def _write_one(
        self, order: GroupRequest, record: journal_pb2.JournalRollout, retry: StoreRetry
    ) -> None:
        name = f"tokens of rollout {record.rollout.rollout_id}"
        try:
            await retry.retry(name, lambda: asyncio.to_thread(self._move_links, order, record))
        except StoreError as error:
            mask_rollout(record, f"its tokens were not stored: {error}", reason=NOT_STORED)
            for part in ("links", "calls", "final_message"):
                record.rollout.ClearField(part)

    def _move_links(self, order: GroupRequest, record: journal_pb2.JournalRollout) -> None:
        rollout = record.rollout
        try:
            check_rollout(
                rollout,
                vocab_size=self.vocab_size,
                max_tokens=order.limits.context_tokens,
                position_of=lambda _: 0,  # the controller knows the versions
            )
            _check_bytes(sum(link.ByteSize() for link in rollout.links))
        except InvalidSpanError as error:
            mask_rollout(record, str(error), reason=error.reason)
        except InvalidFieldError as error:
            mask_rollout(record, str(error))
        else:
            is_evaluation = order.purpose is Purpose.EVALUATION
            prefix = group_prefix(order.group_id, of_evaluation=is_evaluation)
            content = write_links(self.store, prefix, rollout)
            calls = write_calls(self.store, prefix, rollout)
            if calls is not None:
                content.calls.CopyFrom(calls)
                content.figures.CopyFrom(measure_calls(rollout))
                rollout.ClearField("calls")
                rollout.ClearField("final_message")
            record.content.CopyFrom(content)
        rollout.ClearField("links")


def _check_bytes(size: int) -> None:
    """Refuse tokens that fill an object.

    Raises:
        InvalidFieldError: they do.
    """
    limit = MAX_CONTENT_BYTES // 2
    if size > limit:
        raise InvalidFieldError("links", f"{size} bytes; {limit} are the limit")

"""Writer of the contents of finished rollouts: they are durable before the controller hears."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from etude.common.blobs import Store
from etude.common.errors import InvalidFieldError
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


@dataclass(slots=True, kw_only=True)
class ContentWriter:
    """Moves links and calls of finished rollouts from their records to the run's store."""

    store: Store
    vocab_size: int
    retry: StoreRetry = field(default_factory=StoreRetry)
    """Unlimited, as that of the journal: without the store no rollout counts."""

    async def write(
        self, order: GroupRequest, records: Iterable[journal_pb2.JournalRollout]
    ) -> None:
        """Write the links of these rollouts; one that cannot be trained on is masked."""
        await asyncio.gather(
            *(self._write_one(order, record) for record in records if record.rollout.links)
        )

    async def _write_one(self, order: GroupRequest, record: journal_pb2.JournalRollout) -> None:
        name = f"tokens of rollout {record.rollout.rollout_id}"
        await self.retry.retry(name, lambda: asyncio.to_thread(self._move_links, order, record))

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

"""Reader of batches: the rollouts of a step, from the run's store, by each rank for itself."""

import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

from etude.common.backoff import Backoff
from etude.common.blobs import MissingError, is_unavailable
from etude.common.blobs.store import ShortReadError
from etude.common.errors import CorruptError, InvalidFieldError, StoreError
from etude.trainer.contents.measures import measure_uses
from etude.trainer.contents.objects import ObjectSource, read_links
from etude.trainer.contents.rollout_checks import check_rollout
from etude.trainer.learner.batches import (
    DamagedRolloutsError,
    PolicyBatch,
    StoredRollout,
    links_of,
)
from etude.trainer.learner.data.windows import RankExchange
from etude.v1 import rollout_content_pb2, rollout_pb2

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
READS_AT_ONCE = 16
READS = 2
"""Reads of a rollout that is damaged each time: the first one may be damaged on its way."""


class TokenLimits(NamedTuple):
    """Tokens that a model can process."""

    vocab_size: int
    context: int
    """Most tokens of one link."""


class RolloutDamage(NamedTuple):
    """Reason for which a rollout cannot be read."""

    rollout_id: str
    what: str


class _ReadAnswer(NamedTuple):
    """Rollouts that one rank could not read, by id, or the error of its store."""

    damaged: Mapping[str, str]
    error: StoreError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReader:
    """Reads the stored rollouts of batches; every method is collective."""

    source: ObjectSource
    limits: TokenLimits
    ranks: RankExchange

    def read(self, batch: PolicyBatch) -> PolicyBatch:
        """Read the stored rollouts of a batch; the links of all rollouts are in their order.

        Raises:
            DamagedRolloutsError: rollouts are gone, damaged or not what was accepted, for at least
                one rank; all ranks raise it alike.
            StoreError: the store refuses, to at least one rank.
        """
        if not batch.stored:
            return batch
        found, own = self._read_all(batch)
        answers = self.ranks.gather_objects(own)
        for answer in answers:
            if answer.error is not None:
                raise answer.error
        if damaged := {name: what for each in answers for name, what in each.damaged.items()}:
            raise DamagedRolloutsError(damaged)
        sequences = list(batch.sequences)
        for each, rollout in zip(batch.stored, found, strict=True):
            sequences += links_of(rollout, index=each.rollout, current=batch.current)
        ordered = sorted(sequences, key=lambda sequence: sequence.rollout)
        return replace(batch, sequences=tuple(ordered), stored=())

    def _read_all(self, batch: PolicyBatch) -> tuple[list[rollout_pb2.Rollout], _ReadAnswer]:
        """Read several rollouts at the same time; those that are damaged are left out."""
        with ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="contents") as pool:
            try:
                answers = list(pool.map(self._read_patiently, batch.stored))
            except StoreError as error:
                return [], _ReadAnswer({}, error)
        found = [each for each in answers if isinstance(each, rollout_pb2.Rollout)]
        damaged = [each for each in answers if isinstance(each, RolloutDamage)]
        return found, _ReadAnswer({each.rollout_id: each.what for each in damaged})

    def _read_patiently(self, stored: StoredRollout) -> rollout_pb2.Rollout | RolloutDamage:
        """Read a rollout, again for as long as the store is away, as writers of the journal do.

        Raises:
            StoreError: the store refuses.
        """
        backoff, failures = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0
        while True:
            try:
                return self._read_checked(stored)
            except (MissingError, CorruptError, ShortReadError, InvalidFieldError) as error:
                failures += 1
                if failures == READS:
                    return RolloutDamage(stored.rollout_id, str(error))
            except StoreError as error:
                if not is_unavailable(error):
                    raise
                log.warning("rollout %s is read again: %s", stored.rollout_id, error)
                time.sleep(backoff.next_s())

    def _read_checked(self, stored: StoredRollout) -> rollout_pb2.Rollout:
        """Read a rollout, and check its tokens as those of a record are checked.

        Raises:
            CorruptError: it is not what was accepted.
            InvalidFieldError: it cannot be trained on.
        """
        content = rollout_content_pb2.RolloutContent.FromString(stored.content)
        rollout = read_links(self.source, content, stored.rollout_id)
        if measure_uses(rollout.links) != list(content.uses):
            where = f"{self.source.url}/{content.tokens.key}"
            raise CorruptError(f"{where}: has other versions than were accepted")
        check_rollout(
            rollout,
            vocab_size=self.limits.vocab_size,
            max_tokens=self.limits.context,
            position_of=lambda _: 0,  # the controller has checked the same versions
        )
        return rollout

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
ROUND_S = 60.0
"""Longest time that a rank reads before it answers the others: each of them may have fetched all
that another still waits for, and takes one that is silent for minutes for dead."""


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
    num_left: int = 0
    """Rollouts that it has not read yet."""


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
        sequences = list(batch.sequences)
        for place, rollout in self._read_all(batch).items():
            sequences += links_of(rollout, index=place, current=batch.current)
        ordered = sorted(sequences, key=lambda sequence: sequence.rollout)
        return replace(batch, sequences=tuple(ordered), stored=())

    def _read_all(self, batch: PolicyBatch) -> dict[int, rollout_pb2.Rollout]:
        """Read rounds until no rank has a rollout left; rollouts by their places.

        Raises:
            DamagedRolloutsError: some cannot be read by at least one rank.
            StoreError: the store refuses, to at least one rank.
        """
        found: dict[int, rollout_pb2.Rollout | RolloutDamage] = {}
        while True:
            answers = self.ranks.gather_objects(self._read_round(batch, found))
            for answer in answers:
                if answer.error is not None:
                    raise answer.error
            if not any(answer.num_left for answer in answers):
                break
        if damaged := {name: what for each in answers for name, what in each.damaged.items()}:
            raise DamagedRolloutsError(damaged)
        return {p: each for p, each in found.items() if isinstance(each, rollout_pb2.Rollout)}

    def _read_round(
        self, batch: PolicyBatch, found: dict[int, rollout_pb2.Rollout | RolloutDamage]
    ) -> _ReadAnswer:
        """Read several rollouts at the same time, for one round; what was found before stays.

        Args:
            batch: to read.
            found: gets each rollout, or its damage, by its place.
        """
        until_s = time.monotonic() + ROUND_S
        left = [each for each in batch.stored if each.rollout not in found]
        with ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="contents") as pool:
            try:
                answers = list(pool.map(lambda each: self._read_patiently(each, until_s), left))
            except StoreError as error:
                return _ReadAnswer({}, error)
        for stored, answer in zip(left, answers, strict=True):
            if answer is not None:
                found[stored.rollout] = answer
        damaged = [each for each in found.values() if isinstance(each, RolloutDamage)]
        return _ReadAnswer(
            {each.rollout_id: each.what for each in damaged},
            num_left=len(batch.stored) - len(found),
        )

    def _read_patiently(
        self, stored: StoredRollout, until_s: float
    ) -> rollout_pb2.Rollout | RolloutDamage | None:
        """Read a rollout, again for as long as the store is away, as writers of the journal do.

        Args:
            stored: to read.
            until_s: end of the round by the monotonic clock; None is the answer then.

        Raises:
            StoreError: the store refuses.
        """
        backoff, failures = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0
        while time.monotonic() < until_s:
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
        return None

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

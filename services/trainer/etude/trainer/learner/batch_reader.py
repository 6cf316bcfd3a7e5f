"""Reader of batches: the rollouts of a step, from the run's store, by each rank for itself."""

import logging
import time
from dataclasses import replace

from etude.common.backoff import Backoff
from etude.common.blobs import MissingError, Store, is_unavailable
from etude.common.errors import CorruptError, StoreError
from etude.trainer.contents.objects import read_all_links
from etude.trainer.learner.batches import PolicyBatch, links_of
from etude.v1 import rollout_content_pb2, rollout_pb2

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0


def read_batch(store: Store, batch: PolicyBatch) -> PolicyBatch:
    """Read the stored rollouts of a batch; the links of all rollouts are in their order.

    Raises:
        CorruptError: a rollout is gone or damaged; it is named.
        StoreError: the store refuses.
    """
    if not batch.stored:
        return batch
    parse = rollout_content_pb2.RolloutContent.FromString
    contents = [parse(each.content) for each in batch.stored]
    found = _read_patiently(store, contents, [each.rollout_id for each in batch.stored])
    sequences = list(batch.sequences)
    for each, rollout in zip(batch.stored, found, strict=True):
        sequences += links_of(rollout, index=each.rollout, current=batch.current)
    ordered = sorted(sequences, key=lambda sequence: sequence.rollout)
    return replace(batch, sequences=tuple(ordered), stored=())


def _read_patiently(
    store: Store, contents: list[rollout_content_pb2.RolloutContent], ids: list[str]
) -> list[rollout_pb2.Rollout]:
    """Read rollouts, again for as long as the store is away, as writers of the journal do.

    Raises:
        CorruptError: a rollout is gone or damaged; it is named.
        StoreError: the store refuses.
    """
    backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    while True:
        try:
            return read_all_links(store, contents, ids)
        except MissingError as error:
            raise CorruptError(f"a rollout of the batch is gone: {error}") from error
        except StoreError as error:
            if not is_unavailable(error):
                raise
            log.warning("the batch is read again: %s", error)
            time.sleep(backoff.next_s())

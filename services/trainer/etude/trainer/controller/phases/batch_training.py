"""Training of journaled batches, without rollouts whose tokens cannot be read any more."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.trainer import metrics
from etude.trainer.controller.admission.dropping import DAMAGED, drop_rollout
from etude.trainer.controller.admission.groups import RolloutGroup, build_policy_batch
from etude.trainer.controller.phases.guards import check_faults
from etude.trainer.controller.run import Run
from etude.trainer.learner.batches import DamagedRolloutsError, PolicyBatch, StepResult

MAX_MESSAGE = 1_000
"""Longest message of an event."""


def build_batch(run: Run, groups: Sequence[RolloutGroup]) -> PolicyBatch:
    """Build the learner's batch; tokens of versions with the learner's weights are marked."""
    ledger, step = run.book.ledger, run.progress.cursor.global_step
    current = {version for version, published in ledger.versions.items() if published == step}
    if ledger.dropped[DAMAGED]:
        # Earlier controllers may have published weights that trained what is left out now.
        current = {version for version in current if version.epoch == run.progress.epoch}
    return build_policy_batch(groups, current=current)


def fetch_contents(run: Run, groups: Iterable[RolloutGroup], *, steps: int) -> None:
    """Have the learner fetch the tokens of groups while other steps run.

    Args:
        run: of the groups.
        groups: with finished rollouts.
        steps: after this number of further steps no batch may have them.
    """
    records = [group.finished[index] for group in groups for index in group.valid_indices()]
    stored = [record.content.tokens for record in records if record.HasField("content")]
    if stored:
        run.learners.fetch_contents([each.SerializeToString() for each in stored], steps)


async def train_batch(
    run: Run, groups: Sequence[RolloutGroup], limits: RolloutPolicy
) -> StepResult:
    """Train a batch of the journal.

    Rollouts that the learner cannot read are dropped in the journal, and the batch is trained
    without them: by this controller, and by each that trains it again.

    Raises:
        InfraFailuresError: more rollouts of the batch are lost than the run allows.
        DamagedRolloutsError: the learner names rollouts that are not in the batch.
    """
    while True:
        try:
            return await run.learners.policy_step(build_batch(run, groups))
        except DamagedRolloutsError as error:
            lost = _find_rollouts(groups, error.rollouts)
            if not lost:
                raise  # of no rollout of the batch: another attempt would be the same
            # Before they are dropped: a batch that ends the run is whole if they are restored.
            check_faults(run.progress, groups, limits, damaged=[each.what for each in lost])
            await _drop_damaged(run, lost)


class _LostRollout(NamedTuple):
    """A rollout of a batch that cannot be read."""

    group: RolloutGroup
    rollout_id: str
    what: str


def _find_rollouts(
    groups: Sequence[RolloutGroup], damaged: Mapping[str, str]
) -> list[_LostRollout]:
    """Find the valid rollouts of a batch that are damaged."""
    names = [
        (group, group.finished[index].rollout.rollout_id)
        for group in groups
        for index in group.valid_indices()
    ]
    return [_LostRollout(group, name, damaged[name]) for group, name in names if name in damaged]


async def _drop_damaged(run: Run, lost: Sequence[_LostRollout]) -> None:
    """Drop rollouts of a batch durably."""
    for each in lost:
        run.publishing.batch_sequence = drop_rollout(run.book, each.group, each.rollout_id, DAMAGED)
        metrics.DAMAGED_ROLLOUTS.inc()
    why = "; ".join(f"{each.rollout_id}: {each.what}" for each in lost)
    message = f"{len(lost)} left out of step {run.progress.cursor.step + 1}: {why}"
    run.reporter.record_event("RolloutsDamaged", message[:MAX_MESSAGE], warning=True)
    # A damage may pass: what is trained now must be what a successor trains.
    await run.book.journal.wait_durable(run.publishing.batch_sequence)

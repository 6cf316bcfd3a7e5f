"""The kind Checkpoint."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from etude.common.api.checkpoint.status import CheckpointStatus
from etude.common.api.kinds import Checkpoint
from etude.common.api.schema import crd
from etude.operator.actions import Action, Decision
from etude.operator.checkpoints import decide
from etude.operator.checkpoints.job_slots import PendingJobs
from etude.operator.kind import KindContext, KindReconciler, PassInput, ResourceKind
from etude.operator.manifests import OWN_KINDS, Manifest, checkpoint_of


@dataclass(slots=True)
class CheckpointReconciler(KindReconciler[Checkpoint, CheckpointStatus]):
    """Observes checkpoints and decides, with the Job slots of each namespace."""

    context: KindContext
    _pending_jobs: PendingJobs = field(default_factory=PendingJobs)

    @override
    def decide(
        self, resource: Checkpoint, manifest: Manifest, inputs: PassInput
    ) -> Decision[CheckpointStatus]:
        observed = decide.observe_checkpoint(
            self.context.cluster, resource, inputs.problem, self._pending_jobs
        )
        return decide.decide(resource, observed, inputs.now, inputs.platform)

    @override
    def reserve(self, actions: Sequence[Action]) -> contextlib.AbstractContextManager[None]:
        # Nothing was awaited since the decision: no other pass has seen the same slot free.
        return self._pending_jobs.track(actions)


def _owner_of(child: Manifest) -> str | None:
    return None if child["kind"] in OWN_KINDS else checkpoint_of(child)


CHECKPOINT = ResourceKind(
    definition=crd.CHECKPOINT,
    model=Checkpoint,
    status=CheckpointStatus,
    reconciler=CheckpointReconciler,
    owner_of=_owner_of,
)

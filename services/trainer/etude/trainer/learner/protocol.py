"""Protocol between the controller and the learner, as it crosses Ray."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from etude.common.api.run.phases import Phase
from etude.common.checkpoints.manifest import CheckpointObject
from etude.common.errors import UnavailableError
from etude.common.weights import VersionId
from etude.trainer.export.receipts import PublishBase, RankReceipt
from etude.trainer.learner.batches import PolicyBatch, StepResult


class LearnerLostError(UnavailableError):
    """A learner rank died; the run resumes from its checkpoint and its journal."""

    reason = "LearnerLost"


class Learners(Protocol):
    """The learner, all ranks of it together."""

    async def start_phase(self, phase: Phase, step: int, data_cursor: str = "") -> None:
        """Start a phase of which `step` steps are done, or update its settings and data.

        Streamed data goes on from the cursor, which the last step's result has.
        """

    async def supervised_step(self, step: int) -> StepResult:
        """Train on the batch of a step, counted from 0."""
        ...

    async def held_out_losses(self) -> Mapping[str, float]:
        """Mean loss of a trained token of each dataset of the phase's validation, in nats."""
        ...

    async def policy_step(self, batch: PolicyBatch) -> StepResult:
        """Train on rewards, or on given advantages.

        Raises:
            DamagedRolloutsError: rollouts of the batch cannot be read; nothing was trained.
        """
        ...

    def fetch_contents(self, references: Sequence[bytes], steps: int) -> None:
        """Have tokens of finished rollouts fetched while other steps run; not waited for.

        Args:
            references: ContentObject messages, serialised.
            steps: after this number of further steps no batch may have them.
        """

    async def measure_divergence(self, batch: PolicyBatch) -> float:
        """Mean KL(policy || sampler) of a sampled token of the batch, in nats; trains nothing."""
        ...

    async def encode(self, version: VersionId, base: PublishBase | None) -> list[RankReceipt]:
        """Encode the current weights, as a delta from the base if they descend from it.

        Returns:
            Receipt of each rank, in rank order; nothing is stored yet.
        """
        ...

    async def upload(self, version: VersionId) -> None:
        """Upload an encoded version; other calls may run meanwhile."""

    async def copy_state(self, prefix: str) -> None:
        """Copy the complete state of the present step to the ranks' memory, for save(prefix)."""

    async def save(self, prefix: str) -> list[CheckpointObject]:
        """Write the state copied for the prefix to <prefix>learner/; other calls may run meanwhile.

        A rank refuses a call that reaches it after a copy for another prefix.

        Returns:
            Objects of all ranks; keys are relative to the prefix.
        """
        ...

    async def restore(self, prefix: str) -> None:
        """Restore the state that was saved at the prefix."""

    async def export(self, prefix: str) -> list[CheckpointObject]:
        """Write <prefix>model/ as a Hugging Face folder; keys are relative to the prefix.

        Of a run that trains adapters, <prefix>adapter/ is written too, as a PEFT folder.
        """
        ...

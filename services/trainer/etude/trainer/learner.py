"""One learner rank: the weights, their optimiser, and the steps that change them."""

from collections.abc import Mapping, Sequence

from etude.common.blobs import ObjectInfo
from etude.common.weights import VersionId
from etude.trainer.batches import PolicyBatch, StepResult, SupervisedSequence
from etude.trainer.learner_config import LearnerConfig


class Learner:
    """Trains one copy, or one rank's shard, of the policy; a plain class that Ray may wrap.

    Every method is collective: with more than one rank, call it on all of them alike.
    """

    def __init__(self, config: LearnerConfig) -> None: ...

    def start_phase(self, phase: Mapping[str, object], step: int) -> None:
        """Take the settings of a phase (JSON of api.phases.Phase), `step` steps of it being done.

        The optimiser starts afresh, unless this very phase was restored: then only its settings
        are renewed.
        """

    def supervised_step(self, sequences: Sequence[SupervisedSequence]) -> StepResult:
        """One update towards the given tokens."""
        raise NotImplementedError

    def policy_step(self, batch: PolicyBatch) -> StepResult:
        """One update from the rewards of whole groups."""
        raise NotImplementedError

    def publish(self, version: VersionId, step: int) -> dict[str, object] | None:
        """Make the present weights visible under version; the manifest as JSON, on rank 0."""
        raise NotImplementedError

    def save(self, prefix: str) -> list[ObjectInfo]:
        """Write the complete state below prefix; what was written, on rank 0."""
        raise NotImplementedError

    def restore(self, prefix: str) -> tuple[str, int]:
        """Return to a saved state; the phase it was in and the steps done of it."""
        raise NotImplementedError

    def export(self, prefix: str) -> list[ObjectInfo]:
        """Write the weights below prefix as a Hugging Face folder; what was written, on rank 0."""
        raise NotImplementedError

    def digest(self) -> str:
        """BLAKE3 of the fp32 weights, in the order of their names."""
        raise NotImplementedError

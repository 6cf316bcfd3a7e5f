"""Actor of one learner rank: the learner with the dataset that it trains on."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from etude.agent.chat import ChatFormat
from etude.common.api.run.phases import Phase
from etude.common.blobs import ObjectInfo
from etude.common.checkpoints import manifest
from etude.common.checkpoints.manifest import CheckpointObject
from etude.common.errors import WrongStateError
from etude.common.stores import open_run_store
from etude.common.weights import VersionId
from etude.trainer.export.receipts import PublishBase, RankReceipt
from etude.trainer.learner.batches import PolicyBatch, StepResult
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.dataset import SupervisedDataset, load_dataset

if TYPE_CHECKING:
    from etude.trainer.learner.learner import Learner

LEARNER = "learner"
MODEL = "model"


class LearnerRank:
    """One learner rank. Calls are collective, as the learner's are; load() comes first."""

    _learner: "Learner"

    def __init__(self, config: LearnerConfig) -> None:
        self._config = config
        self._store = open_run_store(config.storage.uri, config.storage)
        self._corpus: SupervisedDataset | None = None

    def load(self) -> None:
        """Load the model; Ray would report an error of the constructor as a dead actor."""
        # The controller names this class, and must not load torch for it.
        from etude.trainer.learner.learner import Learner  # noqa: PLC0415 - torch is heavy

        self._learner = Learner(self._config)

    def start_phase(self, phase_json: Mapping[str, object], step: int) -> None:
        """Start or update a phase, and load its dataset if it has one."""
        phase = Phase.model_validate(phase_json)
        self._corpus = None
        if phase.data is not None:
            self._corpus = load_dataset(
                phase,
                chat=ChatFormat.load(self._config.model_folder),
                context=self._learner.policy.config.max_position_embeddings,
                storage=self._config.storage,
            )
        self._learner.start_phase(phase_json, step)

    def supervised_step(self, step: int) -> StepResult:
        """Train on the batch of a step.

        Raises:
            WrongStateError: the phase has no data.
        """
        if self._corpus is None:
            raise WrongStateError("the phase has no data")
        return self._learner.supervised_step(self._corpus.batch(step))

    def policy_step(self, batch: PolicyBatch) -> StepResult:
        return self._learner.policy_step(batch)

    def encode(self, version: VersionId, base: PublishBase | None) -> RankReceipt:
        return self._learner.encode(version, base)

    def upload(self, version: VersionId) -> None:
        self._learner.upload(version)

    def save(self, prefix: str) -> list[CheckpointObject]:
        return self._describe_objects(prefix, self._learner.save(prefix + LEARNER))

    def export(self, prefix: str) -> list[CheckpointObject]:
        return self._describe_objects(prefix, self._learner.export(prefix + MODEL))

    def _describe_objects(self, prefix: str, written: list[ObjectInfo]) -> list[CheckpointObject]:
        # Digests of what the store holds, not of what was meant: a bad write is found here.
        return [
            manifest.describe_object(self._store, prefix, info.key.removeprefix(prefix))
            for info in written
        ]

    def restore(self, prefix: str) -> None:
        self._learner.restore(prefix + LEARNER)

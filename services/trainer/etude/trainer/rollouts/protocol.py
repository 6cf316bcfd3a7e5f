"""What the controller asks of rollout workers and learners; both sides of the Ray door know it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from etude.common.api.phases import Phase, RolloutPolicy
from etude.common.api.run import Storage
from etude.common.checkpoints import CheckpointObject
from etude.common.errors import UnavailableError
from etude.common.weights import VersionId
from etude.common.weights.protocol.manifest import Stats
from etude.trainer.export.receipts import Base, Receipt
from etude.trainer.learner.batches import PolicyBatch, StepResult
from etude.v1 import environments_pb2


class WorkerLostError(UnavailableError):
    """The process that ran a group died; the group may be run again."""

    reason = "WorkerLost"


class LearnerLostError(UnavailableError):
    """A learner rank died; the run resumes from its checkpoint and its journal."""

    reason = "LearnerLost"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOrder:
    """Some siblings of one group to run and score."""

    group_id: str
    task_id: str
    task_uri: str
    """Folder of the task in Harbor layout."""
    environment: str
    """Entry of roles.environments."""
    indices: tuple[int, ...]
    """Which siblings; all of the group, unless some are finished already."""
    seed: int
    temperature: float
    """0 is greedy."""
    targets: tuple[str, ...]
    """Engines in rotation; the first is asked first."""
    limits: RolloutPolicy
    draws: tuple[int, ...] = ()
    """How often each sibling of the group was dropped to be drawn again; none was unless set."""
    share: int | None = None
    """Of limits.max_concurrent for the worker that runs it; all of it unless set."""
    trace: tuple[tuple[str, str], ...] = ()
    """Trace context of the controller."""

    def rollout_id(self, index: int) -> str:
        """The name of a sibling; one that is drawn again has a name of its own."""
        drawn = self.draws[index] if index < len(self.draws) else 0
        return f"{self.group_id}-{index}" + (f"-again{drawn}" if drawn else "")


def shares(total: int, workers: int) -> list[int]:
    """A limit in even parts, one per worker; a limit below the number of workers idles some."""
    used = min(total, workers)
    return [total // used + (place < total % used) for place in range(used)]


class GroupResult(NamedTuple):
    """Finished rollouts, scored or masked: one per index of the order."""

    records: tuple[bytes, ...]
    """JournalRollout messages, serialised in the worker so that the controller does not have to."""
    retried: int
    """Rollouts that were repeated after a platform fault."""
    driver: str
    """Of the environments."""
    isolation: environments_pb2.Isolation
    lost: int = 0
    """Environments that went away under these rollouts."""
    recovered: int = 0
    """Of those: made again elsewhere, so that the rollout went on."""
    replayed: int = 0
    """Calls that were run again for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What one rollout worker is told when it starts."""

    run: str
    """UID of the run."""
    model_folder: Path
    """With the tokenizer."""
    brokers: Mapping[str, str]
    """host:port by environment."""
    templates: Mapping[str, str]
    """Template by environment."""
    rewards_target: str
    score_timeout_s: float
    storage: Storage
    """How to reach task folders."""
    outage_s: float
    """How long an engine or broker that does not answer is waited for."""
    traces_file: Path | None = None
    otlp_endpoint: str | None = None


class Rollouts(Protocol):
    """Whoever runs groups."""

    async def run(self, order: GroupOrder) -> GroupResult:
        """Run and score the siblings of an order.

        Raises:
            WorkerLostError: the worker died.
        """
        ...


class Published(NamedTuple):
    """A version that readers may see."""

    manifest_sha256: str
    size_bytes: int
    stats: Stats
    is_complete: bool
    """Whether it needs no earlier version."""

    @property
    def density(self) -> float:
        """Share of the elements that changed."""
        return self.stats.changed / max(1, self.stats.elements)

    @property
    def bits_per_change(self) -> float:
        """Stored for each."""
        return 8 * self.size_bytes / max(1, self.stats.changed)


class Learners(Protocol):
    """The learner, all ranks of it together."""

    async def start_phase(self, phase: Phase, step: int) -> None:
        """Take the settings and data of a phase of which step steps are done."""

    async def supervised_step(self, step: int) -> StepResult:
        """Train on the batch of a step, counted from 0."""
        ...

    async def policy_step(self, batch: PolicyBatch) -> StepResult:
        """Train on rewards."""
        ...

    async def encode(self, version: VersionId, base: Base | None) -> list[Receipt]:
        """Encode the present weights, as changes of the base if they descend from it.

        Returns:
            What each rank encoded, in their order; none of it is stored yet.
        """
        ...

    async def upload(self, version: VersionId) -> None:
        """Store what was encoded; other calls may be under way meanwhile."""

    async def save(self, prefix: str) -> list[CheckpointObject]:
        """Write the complete state to <prefix>learner/; keys are relative to the prefix."""
        ...

    async def restore(self, prefix: str) -> None:
        """Return to the state that was saved at the prefix."""

    async def export(self, prefix: str) -> list[CheckpointObject]:
        """Write <prefix>model/ as a Hugging Face folder; keys are relative to the prefix."""
        ...

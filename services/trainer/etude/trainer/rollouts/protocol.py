"""Protocol between the controller, rollout workers and learners, as it crosses Ray."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from etude.common.api.run.phases import Phase, RolloutPolicy
from etude.common.api.run.spec import Storage
from etude.common.checkpoints.manifest import CheckpointObject
from etude.common.errors import UnavailableError
from etude.common.weights import VersionId
from etude.common.weights.protocol.manifest import Stats
from etude.trainer.export.receipts import Base, Receipt
from etude.trainer.learner.batches import PolicyBatch, StepResult
from etude.v1 import environments_pb2


class WorkerLostError(UnavailableError):
    """The process that ran a group died; the group may be retried."""

    reason = "WorkerLost"


class LearnerLostError(UnavailableError):
    """A learner rank died; the run resumes from its checkpoint and its journal."""

    reason = "LearnerLost"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOrder:
    """Request to run and score some siblings of one group."""

    group_id: str
    task_id: str
    task_uri: str
    """Folder of the task in Harbor layout."""
    environment: str
    """Entry of roles.environments."""
    indices: tuple[int, ...]
    """Indices of the siblings; all of the group, unless some are finished already."""
    seed: int
    temperature: float
    """0 is greedy."""
    targets: tuple[str, ...]
    """Engines in rotation; the first is asked first."""
    limits: RolloutPolicy
    draws: tuple[int, ...] = ()
    """Number of earlier draws of each sibling of the group; empty if none was redrawn."""
    share: int | None = None
    """The worker's share of limits.max_concurrent; all of it unless set."""
    trace: tuple[tuple[str, str], ...] = ()
    """Trace context of the controller."""

    def rollout_id(self, index: int) -> str:
        """Id of a sibling; a redrawn one has a new id."""
        drawn = self.draws[index] if index < len(self.draws) else 0
        return f"{self.group_id}-{index}" + (f"-again{drawn}" if drawn else "")


def shares(total: int, workers: int) -> list[int]:
    """Split a limit evenly over workers; a limit below their number leaves some idle."""
    used = min(total, workers)
    return [total // used + (place < total % used) for place in range(used)]


class GroupResult(NamedTuple):
    """Finished rollouts, scored or masked: one per index of the order."""

    records: tuple[bytes, ...]
    """JournalRollout messages, serialised in the worker to spare the controller."""
    retried: int
    """Rollouts that were retried after a platform fault."""
    driver: str
    """Driver of the environments."""
    isolation: environments_pb2.Isolation
    lost: int = 0
    """Environments that were lost under these rollouts."""
    recovered: int = 0
    """Lost environments that were replaced, so that the rollout went on."""
    replayed: int = 0
    """Calls that were replayed in replacements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Configuration of one rollout worker."""

    run: str
    """UID of the run."""
    model_folder: Path
    """Folder with the tokenizer."""
    brokers: Mapping[str, str]
    """host:port by environment."""
    templates: Mapping[str, str]
    """Template by environment."""
    rewards_target: str
    score_timeout_s: float
    storage: Storage
    """Access to task folders."""
    outage_s: float
    """Longest wait for an engine or broker that does not answer."""
    traces_file: Path | None = None
    otlp_endpoint: str | None = None


class Rollouts(Protocol):
    """All rollout workers together."""

    async def run(self, order: GroupOrder) -> GroupResult:
        """Run and score the siblings of a request.

        Raises:
            WorkerLostError: the worker died.
        """
        ...


class Published(NamedTuple):
    """Size and statistics of a published version."""

    manifest_sha256: str
    size_bytes: int
    stats: Stats
    is_complete: bool
    """True if it needs no earlier version."""

    @property
    def density(self) -> float:
        """Share of the elements that changed."""
        return self.stats.changed / max(1, self.stats.elements)

    @property
    def bits_per_change(self) -> float:
        """Stored bits per changed element."""
        return 8 * self.size_bytes / max(1, self.stats.changed)


class Learners(Protocol):
    """The learner, all ranks of it together."""

    async def start_phase(self, phase: Phase, step: int) -> None:
        """Start a phase of which `step` steps are done, or update its settings and data."""

    async def supervised_step(self, step: int) -> StepResult:
        """Train on the batch of a step, counted from 0."""
        ...

    async def policy_step(self, batch: PolicyBatch) -> StepResult:
        """Train on rewards."""
        ...

    async def encode(self, version: VersionId, base: Base | None) -> list[Receipt]:
        """Encode the current weights, as a delta from the base if they descend from it.

        Returns:
            Receipt of each rank, in rank order; nothing is stored yet.
        """
        ...

    async def upload(self, version: VersionId) -> None:
        """Upload an encoded version; other calls may run meanwhile."""

    async def save(self, prefix: str) -> list[CheckpointObject]:
        """Write the complete state to <prefix>learner/; keys are relative to the prefix."""
        ...

    async def restore(self, prefix: str) -> None:
        """Restore the state that was saved at the prefix."""

    async def export(self, prefix: str) -> list[CheckpointObject]:
        """Write <prefix>model/ as a Hugging Face folder; keys are relative to the prefix."""
        ...

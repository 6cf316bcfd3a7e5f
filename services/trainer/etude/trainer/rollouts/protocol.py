"""Protocol between the controller and rollout workers, as it crosses Ray."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from etude.agent.summaries import SummaryLimits
from etude.agent.token_policy import RolloutLimits
from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.common.api.storage import Storage
from etude.common.errors import UnavailableError
from etude.trainer.rollouts.completion_counts import CompletionCounts
from etude.trainer.rollouts.endpoint_policy import ChatEndpoint
from etude.trainer.rollouts.trajectories.resume_counts import ResumeCounts
from etude.trainer.rollouts.trajectories.rollback import Rollback
from etude.trainer.routing.table import Purpose, RoutingTable
from etude.v1 import environments_pb2


class WorkerLostError(UnavailableError):
    """The process that ran a group died; the group may be retried."""

    reason = "WorkerLost"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
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
    limits: RolloutPolicy
    purpose: Purpose = Purpose.TRAINING
    routing: RoutingTable = field(default_factory=RoutingTable)
    """The engines at the time of the request; later changes come by `update_routing`."""
    draws: tuple[int, ...] = ()
    """Number of earlier draws of each sibling of the group; empty if none was redrawn."""
    epoch: int = 0
    """Of the controller that sends the request."""
    dispatch: int = 0
    """How often it was sent before, to workers that died."""
    is_continued: bool = False
    """True if an earlier worker may have recorded turns of its rollouts."""
    rollbacks: tuple[Rollback, ...] = ()
    """Turns of versions that these abandon are not gone on from."""
    records_routes: bool = False
    """True if the experts that its tokens take in the engines are recorded."""
    share: int | None = None
    """The worker's share of limits.max_concurrent; all of it unless set."""
    trace: tuple[tuple[str, str], ...] = ()
    """Trace context of the controller."""

    def bound_rollout(self, *, used_s: float) -> RolloutLimits:
        """Bound one rollout.

        Args:
            used_s: seconds that an earlier worker has spent on it.
        """
        limits = self.limits
        return RolloutLimits(
            max_turns=limits.max_turns,
            max_turn_tokens=limits.max_turn_tokens,
            max_tokens=limits.max_tokens,
            timeout_s=max(0.0, limits.timeout_seconds - used_s),
            summaries=None
            if limits.summaries is None
            else SummaryLimits(
                context_tokens=limits.summaries.context_tokens,
                max_tokens=limits.summaries.max_tokens,
            ),
        )

    def rollout_id(self, index: int) -> str:
        """Id of a sibling; a redrawn one has a new id."""
        drawn = self.draws[index] if index < len(self.draws) else 0
        return name_rollout(self.group_id, index, drawn=drawn)


def name_rollout(group_id: str, index: int, *, drawn: int) -> str:
    """Id of a sibling that was drawn so often before."""
    return f"{group_id}-{index}" + (f"-again{drawn}" if drawn else "")


def split_evenly(total: int, workers: int) -> list[int]:
    """Split a limit evenly over workers; a limit below their number leaves some idle."""
    used = min(total, workers)
    return [total // used + (place < total % used) for place in range(used)]


def share_token_slots(total: int, workers: int) -> list[int]:
    """Share token slots among workers, of which each needs one to go on at all."""
    shares = split_evenly(total, workers)
    return shares + [1] * (workers - len(shares))


@dataclass(slots=True)
class StartCounts:
    """Counts of set-ups of a group, and of its rollouts by how each started."""

    setups: int = 0
    """Environments that were set up and saved for all siblings."""
    setups_failed: int = 0
    """Set-ups of which a command failed."""
    setups_lost: int = 0
    """Set-ups that the platform lost."""
    forked: int = 0
    """Rollouts that were forked from what a set-up left."""
    separate: int = 0
    """Rollouts that were set up separately."""
    unprepared: int = 0
    """Rollouts of tasks without a set-up."""


class GroupResult(NamedTuple):
    """Finished rollouts, scored or masked: one per index of the order."""

    records: tuple[bytes, ...]
    """JournalRollout messages, serialised; tokens that they name are in the store."""
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
    starts: StartCounts = StartCounts()
    """Set-ups and starts, read only."""
    completions: CompletionCounts = CompletionCounts()
    """Completions of all rollouts, read only."""
    resumes: ResumeCounts = ResumeCounts()
    """Rollouts that lost their worker or an attempt, read only."""
    content_repeats: int = 0
    """Writes of tokens that were repeated while the store was away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Configuration of one rollout worker."""

    run: str
    """UID of the run."""
    model_folder: Path | None
    """Folder with the tokenizer; None for a policy at an endpoint."""
    endpoint: ChatEndpoint | None = None
    """Of the policy; None for one on engines."""
    model_uri: str = ""
    """Object store that holds the folder too; empty if it is shared by all hosts."""
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
    stores_contents: bool = False
    """True if the tokens of finished rollouts go to the run's store, and records name them."""
    traces_file: Path | None = None
    otlp_endpoint: str | None = None


class RolloutWorkers(Protocol):
    """All rollout workers together."""

    async def run(self, order: GroupRequest) -> GroupResult:
        """Run and score the siblings of a request.

        Raises:
            WorkerLostError: the worker died.
        """
        ...

    async def write_rollouts(self, step: int, split: str, records: Sequence[bytes]) -> None:
        """Have a worker write finished rollouts for people.

        Args:
            step: counted over all phases.
            split: train, or eval-<name>.
            records: JournalRollout messages, serialised.

        Raises:
            EtudeError: they were not written.
        """
        return  # workers without a store write none

    def drop_rollouts(self, rollout_ids: Sequence[str]) -> None:
        """Say that rollouts were cancelled for good: they are dropped, or drawn again.

        Rollouts that are cancelled otherwise are left to a successor, with their environments.
        """
        return  # workers without records have none to delete

    async def update_routing(self, table: RoutingTable) -> None:
        """Give all workers the engines as they are now, and each the loads of the others."""
        ...

    @property
    def num_workers(self) -> int:
        """Number of workers whose loads differ."""
        ...

"""State of the controller in a checkpoint."""

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from etude.common.blobs import Store
from etude.common.checkpoints.manifest import CONTROLLER, CheckpointId, StoredCheckpoint
from etude.common.errors import CorruptError
from etude.trainer.controller.checkpoints.lineage import Branch
from etude.trainer.controller.journal.ledger import LedgerState


def attempt_folder(epoch: int, attempt: int) -> str:
    """Folder of one attempt of an epoch's controller below a checkpoint's prefix."""
    return f"{epoch:06d}/{attempt:03d}/"


class EvaluationResult(BaseModel):
    """Newest result of an evaluation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    success: float
    greedy_success: float | None = None
    """None without a greedy pass."""


class MonitorHistory(BaseModel):
    """Windows of the active phase that monitors compare with; each is the JSON of its facts."""

    model_config = ConfigDict(extra="forbid")

    pending: str = "[]"
    """Rollouts that do not fill a window yet."""
    reference: list[str] = Field(default_factory=list)
    """The first windows that raised nothing, oldest first."""
    previous: list[str] = Field(default_factory=list)
    """The newest others, oldest first."""
    raised: list[str] = Field(default_factory=list)
    """Monitors that the last window raised."""


class Figures(BaseModel):
    """Running figures that survive a restart."""

    model_config = ConfigDict(extra="forbid")

    reward_ewma: float = 0.0
    eval_success: float | None = None
    evaluations: dict[str, EvaluationResult] = Field(default_factory=dict)
    """The newest of each, by name."""
    window: list[float] = Field(default_factory=list)
    """Figures of the last steps of the active phase, for its success policy."""
    monitors: MonitorHistory = Field(default_factory=MonitorHistory)
    productive_seconds: float = 0.0
    step_seconds: list[float] = Field(default_factory=list)
    """Of the last steps of the active phase."""
    retried: int = 0
    resumed: dict[str, int] = Field(default_factory=dict)
    """Rollouts that lost their worker or an attempt, by how they went on."""
    evaluated: int = 0
    """Rollouts of evaluations, which are not trained."""


class Cursor(BaseModel):
    """Position of a run in its program."""

    model_config = ConfigDict(extra="forbid")

    phase: str
    step: int = 0
    """Steps done of the phase."""
    global_step: int = 0
    """Steps done of the run."""
    starts: dict[str, int] = Field(default_factory=dict)
    """Global step at which each phase began."""
    ends: dict[str, int] = Field(default_factory=dict)
    """Steps of phases that end before their last one."""
    finished: list[str] = Field(default_factory=list)
    """Phases that ended."""
    gates: dict[str, str] = Field(default_factory=dict)
    """Met or NotMet, by phase whose gate was checked."""
    policy: tuple[int, int] | None = None
    """Epoch and number of the newest published version."""
    data: str = ""
    """Position in the active phase's streamed data, as JSON; empty without any."""
    evaluated: list[str] = Field(default_factory=list)
    """Finished evaluations, so that a resume does not repeat them."""


class ControllerState(BaseModel):
    """The controller's half of a checkpoint.

    All random draws are functions of the phases' seeds and of positions in this state, so no random
    generator is saved; the seeds are kept to detect a resume with other seeds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = Field(default=1, ge=1, le=1)
    run: str
    epoch: int
    cursor: Cursor
    figures: Figures
    ledger: LedgerState
    sequence: int
    """Newest journal record in this state."""
    seeds: dict[str, int]
    """By phase."""
    added_tokens: tuple[str, ...] | None = None
    """Tokens of model.addTokens, by which the rows of the embedding have their meaning; None in
    checkpoints of earlier releases."""
    branch: int = 0
    """Number of restores to an older checkpoint."""
    path: tuple[tuple[int, int], ...] = ()
    """Branch and step of the last checkpoints of the branches that led here, oldest first."""

    @property
    def way(self) -> Branch:
        """The run's branch of checkpoints."""
        return Branch(self.branch, tuple(CheckpointId(*each) for each in self.path))

    @property
    def replay_from(self) -> int:
        """First journal record that a resume needs."""
        return min([self.sequence + 1, *self.ledger.live.values()])


def read_state(store: Store, found: StoredCheckpoint) -> ControllerState:
    """Read the controller's half of a verified checkpoint.

    Raises:
        CorruptError: there is none, or it is of another format.
    """
    key = found.prefix + found.manifest.state_folder + CONTROLLER
    try:
        return ControllerState.model_validate_json(store.get(key))
    except ValidationError as cause:
        raise CorruptError(f"{store.url}/{key}: {cause}") from cause

"""Where a run stands, as a checkpoint keeps it."""

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from etude.common.blobs import Store
from etude.common.checkpoints import Place, StoredCheckpoint
from etude.common.errors import CorruptError
from etude.trainer.controller.checkpoints.lineage import Branch
from etude.trainer.controller.journal.ledger import LedgerState

CONTROLLER = "controller.json"


def epoch_folder(epoch: int) -> str:
    """Where one epoch writes below a checkpoint's prefix."""
    return f"{epoch:06d}/"


class Measured(BaseModel):
    """What an evaluation found last."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    success: float
    greedy_success: float | None = None
    """None without a greedy pass."""


class Figures(BaseModel):
    """Running figures that survive a restart."""

    model_config = ConfigDict(extra="forbid")

    reward_ewma: float = 0.0
    eval_success: float | None = None
    evaluations: dict[str, Measured] = Field(default_factory=dict)
    """The newest of each, by name."""
    window: list[float] = Field(default_factory=list)
    """Of the steps of the active phase that its success policy looks at."""
    productive_seconds: float = 0.0
    step_seconds: list[float] = Field(default_factory=list)
    """Of the last steps of the active phase."""
    retried: int = 0
    evaluated: int = 0
    """Rollouts of evaluations: work like any other, though none of it is trained."""


class Cursor(BaseModel):
    """The next thing to do."""

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
    """Met or NotMet, of phases whose gates were looked at."""
    policy: tuple[int, int] | None = None
    """Epoch and number of the newest published version."""
    evaluated: list[str] = Field(default_factory=list)
    """Evaluations that are done, so that a resume does not repeat them."""


class ControllerState(BaseModel):
    """The controller's half of a checkpoint.

    All draws are functions of the phases' seeds and of places in this state, so that no random
    generator needs saving; the seeds are kept to notice a run that was resumed with others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = Field(default=1, ge=1, le=1)
    run: str
    epoch: int
    cursor: Cursor
    figures: Figures
    ledger: LedgerState
    sequence: int
    """Newest journal record that this state knows."""
    seeds: dict[str, int]
    """By phase."""
    branch: int = 0
    """How often the run had been put back to an older checkpoint."""
    path: tuple[tuple[int, int], ...] = ()
    """Branch and step of the last checkpoints of the branches that led here, oldest first."""

    @property
    def way(self) -> Branch:
        """The way that the run had gone."""
        return Branch(self.branch, tuple(Place(*each) for each in self.path))

    @property
    def replay_from(self) -> int:
        """First journal record that a resume needs."""
        return min([self.sequence + 1, *self.ledger.live.values()])


def read_state(store: Store, found: StoredCheckpoint) -> ControllerState:
    """The controller's half of a verified checkpoint.

    Raises:
        CorruptError: it is of another format.
    """
    key = found.prefix + epoch_folder(found.manifest.epoch) + CONTROLLER
    try:
        return ControllerState.model_validate_json(store.get(key))
    except ValidationError as cause:
        raise CorruptError(f"{store.url}/{key}: {cause}") from cause

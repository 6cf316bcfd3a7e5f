"""What a node asks of a driver, whatever its wall is made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from etude.agent.workspace import Workspace
from etude.agent.workspace.protocol import Runner
from etude.common.errors import Problem, UnavailableError, UserError, WrongStateError
from etude.envserver.drivers.programs import Program, RunningProgram
from etude.envserver.folders import FolderContent, Limits
from etude.envserver.trees import Tree

HEAD_BYTES, TAIL_BYTES = 16 * 1024, 48 * 1024
"""What is kept of a tool call's output: twice of what the policy is shown (30 KiB), so that the
place where something is missing is never among it."""
GRADE_OUTPUT_BYTES = 64 * 1024


class Strength(StrEnum):
    """How strong the wall is, as leases state it."""

    WEAK = "Weak"
    """Namespaces of the host's kernel: trusted templates, one tenant."""
    MODERATE = "Moderate"
    STRONG = "Strong"


class Start(StrEnum):
    """How a sandbox came to be, from dear to cheap."""

    COPY = "copy"
    """A folder with the first files."""
    SPAWN = "spawn"
    """A machine monitor was started and took up the template."""
    SHELL = "shell"
    """A monitor that waited took up the template."""
    SPLIT = "split"
    """A machine was split off from a stopped clone, and let run."""
    PAUSED_CLONE = "paused_clone"
    """A stopped clone was let run."""
    DELTA = "delta"
    """A snapshot was taken up."""


class Begun(NamedTuple):
    """How a sandbox came to be."""

    start: Start
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """What can be done with a driver's sandboxes beside running tools in them."""

    files: bool
    """Snapshots hold the files."""
    memory: bool
    """Snapshots hold memory and running processes too."""
    freeze: bool
    """They use no CPU time between calls."""
    egress: bool = False
    """They may be given a way to the hosts that a pool lists."""

    @property
    def portable(self) -> bool:
        """Whether snapshots are of use on other nodes: memory is beside its own template only."""
        return self.files and not self.memory


class CapMissingError(WrongStateError):
    """The driver cannot do what was asked of it."""

    reason = "CapMissing"

    def __init__(self, driver: str, cap: str, what: str) -> None:
        super().__init__(f"driver {driver} has no cap {cap!r}: {what}")


class SandboxError(UnavailableError):
    """The sandbox failed, not the policy: retry the rollout, never score it zero."""

    reason = "SandboxFailed"


class HalfRestoredError(SandboxError):
    """It is neither what it was nor what was saved: only restoring it again helps."""

    reason = "HalfRestored"


class DriverUnavailableError(UserError):
    """This machine cannot run the driver, or the driver may not run this pool."""

    def __init__(self, what: str, *, where: str, fix: str) -> None:
        super().__init__(Problem(reason="DriverUnavailable", what=what, where=where, fix=fix))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a command did."""

    output: bytes
    """Both streams: beginning and end."""
    exit_code: int
    timed_out: bool = False
    ended_for: str = ""
    """The limit that ended it: time, memory, output or disk."""
    dropped_bytes: int = 0
    dropped_lines: int = 0
    cpu_ms: int = 0
    wall_ms: int = 0
    collected: bytes | None = None
    begun: Begun | None = None
    """How the sandbox of a verification came to be, where that may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """A verifier's work in a sandbox of its own, which nobody was in before."""

    template: str
    """Name of the pool's template that the sandbox is made of."""
    workspace: Tree
    tests: Tree
    """Shown as /tests."""
    command: str
    timeout_s: float
    reward_path: str
    """A file to read back afterwards: regular, small, reached without links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmth:
    """How ready a driver is for one template."""

    template: str
    paused_clones: int = 0
    shells: int = 0
    spawn_cpu_ms: float = 0.0
    """CPU time of a start for which nothing is ready, as measured here."""
    start_p50_ms: float = 0.0
    start_p90_ms: float = 0.0
    """From order to ready, of the newest of those."""
    quarantined: str = ""
    """Why it starts no more of it, if so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """What a driver could start now, and how soon."""

    templates: Sequence[Warmth] = ()
    free_memory_bytes: int = 0
    """For machines; 0 where that is no limit."""
    queue_ms: float = 0.0
    """Until what already waits has started."""


NOTHING_AHEAD = Readiness()
"""Of a driver that prepares nothing, and whose starts take no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What was saved of a sandbox."""

    num_bytes: int
    digest: str


class Sandbox(Protocol):
    """The workspace of one lease and the shell beside it, behind the driver's wall.

    Every method raises SandboxError for the driver's own failures. Callers see to it that nothing
    runs in the sandbox while it is saved, restored, paused or resumed.
    """

    workspace: Workspace
    """What tools act on, once begin() has ended; its commands go through the given runner."""

    @property
    def has_begun(self) -> bool:
        """Whether the first files were put there, by this process or an earlier one."""
        ...

    @property
    def begun(self) -> Begun | None:
        """How it came to be, if this process began it and could not tell before."""
        return None

    @property
    def is_whole(self) -> bool:
        """Whether it goes on: what ran in it beside calls still runs, or has ended by itself."""
        return True

    async def begin(self, tree: Tree) -> None:
        """Put the first files there; all of them or none."""
        ...

    async def run(self, command: str, timeout_s: float) -> Outcome:
        """Run a shell command in the workspace."""
        ...

    async def content(self, limits: Limits) -> FolderContent:
        """The regular files of the workspace.

        Raises:
            TooLargeError: there is more than the limits allow.
            FileNotFoundError: it is gone.
        """
        ...

    async def start(self, program: Program) -> RunningProgram:
        """Start a program that is talked to while it runs.

        Raises:
            WrongStateError: the driver cannot do that.
        """
        raise WrongStateError("this lease's driver starts no programs beside the agent's calls")

    async def verify(self, work: Verification) -> Outcome:
        """Run a verifier here, after everything of the agent's has ended; nothing runs here later.

        Raises:
            CapMissingError: the driver keeps nothing running for which that would be worth it.
        """
        raise CapMissingError("of this lease", "memory", "it grades in fresh sandboxes only")

    async def save(self, folder: Path, limits: Limits) -> Saved:
        """Write a snapshot into an empty folder of the node's; the sandbox goes on.

        Raises:
            TooLargeError: it would be larger than the limits allow.
        """
        ...

    async def restore(self, folder: Path, saved: Saved) -> None:
        """Become what was saved there, whatever the sandbox was before, if it was anything.

        After any other error it is what it was. If this process dies meanwhile, the next has to
        repeat it.

        Raises:
            CorruptError: it is not what was saved.
            HalfRestoredError: the disk failed when there was no way back.
        """
        ...

    async def pause(self) -> None:
        """Keep its state on the disk only, in the lease's folder; safe to repeat."""
        ...

    async def resume(self) -> None:
        """Go on after a pause; safe to repeat, and without effect where there was none.

        Raises:
            CorruptError: the state on the disk is not what this node wrote.
        """
        ...

    async def close(self) -> None:
        """End whatever runs in it. The lease's folder is removed by the caller."""
        ...


class Driver(Protocol):
    """Makes sandboxes; every method raises SandboxError for its own failures."""

    name: str
    strength: Strength
    caps: Caps
    begins: Start | None
    """How a sandbox comes to be; None where that shows only when its first call arrives."""
    leases: Path
    """One folder for each lease, which the node makes and removes."""

    async def start(self) -> None:
        """Be ready.

        Raises:
            DriverUnavailableError: this machine cannot run it.
        """
        ...

    async def stop(self) -> None:
        """End what belongs to this process; sandboxes stay for the next one."""
        ...

    def readiness(self) -> Readiness:
        """What could be started now, and how soon."""
        return NOTHING_AHEAD

    def keep_warm(self, wanted: Sequence[Warmth], *, max_shells: int) -> None:
        """Have so many paused clones and shells ready; of templates not named, none.

        A driver that prepares nothing need not do anything.

        Args:
            wanted: what is to be ready.
            max_shells: how many of a template a driver may keep because saved states of it are
                taken up.
        """
        return

    def check(self, template: str) -> None:
        """Refuse a template of which no sandbox can be had for now.

        Raises:
            SandboxError: none can; the message says why.
        """
        return

    def sandbox(self, folder: Path, runner: Runner, *, template: str) -> Sandbox:
        """The sandbox of a lease's folder, which an earlier process may have begun.

        Args:
            folder: a folder below leases.
            template: name of the pool's template that it is made of.
            runner: runs what the workspace is told to execute; it may call the sandbox's run().

        Raises:
            SandboxError: what was begun there has ended meanwhile.
        """
        ...

    async def verify(self, work: Verification) -> Outcome:
        """Run a verifier in a fresh sandbox."""
        ...

    def has_services(self, template: str) -> bool:
        """Whether something runs in its sandboxes that no agent started."""
        return False

    def is_repeatable(self, command: str) -> bool:
        """Whether this command does the same in every workspace with the same files."""
        ...

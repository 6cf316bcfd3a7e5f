"""Protocols of drivers and sandboxes, and the values they exchange with the host."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from etude.agent.workspace import Workspace
from etude.agent.workspace.interface import Runner
from etude.common.errors import Problem, UnavailableError, UserError, WrongStateError
from etude.envserver.drivers.accesses import NO_REPORT, AccessReport
from etude.envserver.drivers.egress_rules import NetworkUpdates
from etude.envserver.drivers.programs import Program, RunningProgram
from etude.envserver.images.built_image import BuiltImage
from etude.envserver.storage.folders import FolderContent, FolderLimits
from etude.envserver.storage.trees import Tree
from etude.v1 import environments_pb2

GRADE_OUTPUT_BYTES = 64 * 1024


class IsolationStrength(StrEnum):
    """Strength of the isolation boundary, as leases state it."""

    WEAK = "Weak"
    """Namespaces of the machine's kernel: trusted templates, one tenant."""
    MODERATE = "Moderate"
    STRONG = "Strong"


class StartKind(StrEnum):
    """Kind of a sandbox's start, from expensive to cheap."""

    COPY = "copy"
    """A folder with the initial files."""
    SPAWN = "spawn"
    """A VMM was started and restored the template."""
    SHELL = "shell"
    """An idle VMM restored the template."""
    SPLIT = "split"
    """A child VM was spawned from a frozen clone."""
    PAUSED_CLONE = "paused_clone"
    """A paused clone was resumed."""
    DELTA = "delta"
    """A snapshot was restored."""


class SandboxStart(NamedTuple):
    """Kind and duration of a sandbox's start."""

    kind: StartKind
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverCapabilities:
    """Capabilities of a driver's sandboxes, on top of running tools."""

    files: bool
    memory: bool
    """Snapshots include memory and running processes."""
    freeze: bool
    """They use no CPU time between calls."""
    egress: bool = False
    """They may have egress to the hosts that a pool lists."""

    @property
    def portable(self) -> bool:
        """True if snapshots can be restored on other hosts: memory needs its own template."""
        return self.files and not self.memory


class CapMissingError(WrongStateError):
    """The driver lacks the capability for a request."""

    reason = "CapMissing"

    def __init__(self, driver: str, cap: str, what: str) -> None:
        super().__init__(f"driver {driver} has no cap {cap!r}: {what}")


class SandboxError(UnavailableError):
    """The sandbox failed, not the policy: retry the rollout, never score it zero."""

    reason = "SandboxFailed"


class HalfRestoredError(SandboxError):
    """The restore stopped halfway: only another restore helps."""

    reason = "HalfRestored"


class DriverUnavailableError(UserError):
    """The driver cannot run on this machine, or not for this pool."""

    def __init__(self, what: str, *, where: str, fix: str) -> None:
        super().__init__(Problem(reason="DriverUnavailable", what=what, where=where, fix=fix))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutcome:
    """Outcome of a command."""

    output: bytes
    """Head and tail of both streams."""
    exit_code: int
    timed_out: bool = False
    ended_for: str = ""
    """The limit that ended it: time, memory, output or disk."""
    dropped_bytes: int = 0
    dropped_lines: int = 0
    cpu_ms: int = 0
    wall_ms: int = 0
    collected: bytes | None = None
    accesses: AccessReport = NO_REPORT
    sandbox_start: SandboxStart | None = None
    """Start of a verification's sandbox, where it may vary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """A verifier's command, for a fresh sandbox of its own."""

    template: str
    """Name of the sandbox's pool template."""
    workspace: Tree
    """Files to write into it."""
    deleted: Sequence[str] = ()
    """Files of the template's image to delete from it first."""
    tests: Tree
    """Shown as /tests."""
    command: str
    timeout_s: float
    reward_path: str
    """File to read back afterwards: regular, small, reached without links."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateReadiness:
    """Readiness of a driver for one template."""

    template: str
    paused_clones: int = 0
    shells: int = 0
    spawn_cpu_ms: float = 0.0
    """Measured CPU time of a start that finds nothing ready."""
    start_p50_ms: float = 0.0
    start_p90_ms: float = 0.0
    """From order to ready, over the latest of those."""
    quarantined: str = ""
    """Reason why its starts are refused, if they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverReadiness:
    """Start capacity of a driver."""

    templates: Sequence[TemplateReadiness] = ()
    free_memory_bytes: int = 0
    """For VMs; 0 where memory is not a limit."""
    queue_ms: float = 0.0
    """Time until all waiting starts have begun."""


ALWAYS_READY = DriverReadiness()
"""For a driver that keeps nothing ready, and whose starts take no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSandbox:
    """Size and digest of a saved sandbox."""

    num_bytes: int
    digest: str


class ImageSize(NamedTuple):
    """Bytes that a template of a task's image takes."""

    disk: int
    memory: int = 0


class Sandbox(Protocol):
    """The workspace of one lease and its shell, behind the driver's isolation boundary.

    Every method raises SandboxError for the driver's own failures. Callers make sure that nothing
    runs in the sandbox while it is saved, restored, paused or resumed.
    """

    workspace: Workspace
    """Workspace of the tools, after initialize(); its commands go through the given runner."""

    @property
    def is_started(self) -> bool:
        """True if it has its initial files, from this process or an earlier one."""

    @property
    def sandbox_start(self) -> SandboxStart | None:
        """Its start, if this process started it and could not tell before."""
        return None

    @property
    def is_intact(self) -> bool:
        """True if nothing that ran in it between calls was lost."""
        return True

    async def initialize(self, tree: Tree) -> None:
        """Write the initial files, all or none."""

    async def run(self, command: str, timeout_s: float) -> CommandOutcome:
        """Run a shell command in the workspace."""

    async def read_files(self, limits: FolderLimits) -> FolderContent:
        """Read the regular files of the workspace.

        Raises:
            TooLargeError: the limits are exceeded.
            FileNotFoundError: it is gone.
        """

    async def read_change(
        self, base: bytes, limits: FolderLimits
    ) -> environments_pb2.WorkspaceDiff:
        """Find what differs from the files of a base, without reading what was not written.

        Args:
            base: as `encode_base` made it.
            limits: on the change alone.

        Raises:
            TooLargeError: the limits are exceeded.
            CapMissingError: its workspace is never an image's.
        """
        raise CapMissingError("of this lease", "images", "its workspaces are copied in")

    async def start(self, program: Program) -> RunningProgram:
        """Start an interactive program.

        Raises:
            WrongStateError: the driver does not support it.
        """
        raise WrongStateError("this lease's driver does not start interactive programs")

    async def verify(self, work: Verification) -> CommandOutcome:
        """Run a verifier here after the agent's processes have ended; nothing runs here later.

        Raises:
            CapMissingError: the driver keeps no running state that would be worth it.
        """
        raise CapMissingError("of this lease", "memory", "it grades in fresh sandboxes only")

    async def verify_prepared(self, work: Verification) -> CommandOutcome:
        """Run a verifier on what a task's set-up left; no agent has run here, nothing runs later.

        Args:
            work: the verifier; its files are those that an agent has written and deleted.

        Raises:
            CapMissingError: what is left are files only, which a fresh sandbox can have.
        """
        raise CapMissingError("of this lease", "memory", "it grades in fresh sandboxes only")

    async def save(self, folder: Path, limits: FolderLimits) -> SavedSandbox:
        """Write a snapshot to an empty folder of the host; the sandbox continues.

        Raises:
            TooLargeError: it would be larger than the limits allow.
        """

    async def restore(self, folder: Path, saved: SavedSandbox) -> None:
        """Replace the sandbox's state, whatever it is, by a snapshot.

        After any other error it is unchanged. If this process dies meanwhile, the next one has to
        repeat it.

        Raises:
            CorruptError: the folder is not what was saved.
            HalfRestoredError: the disk failed after the point of no return.
        """

    async def pause(self) -> None:
        """Suspend its state to disk, in the lease's folder; safe to repeat."""

    async def resume(self) -> None:
        """Resume after a pause; safe to repeat, and without effect otherwise.

        Raises:
            CorruptError: the state on disk was not written by this host.
        """

    async def close(self) -> None:
        """End all that runs in it. The caller removes the lease's folder."""


class Driver(NetworkUpdates, Protocol):
    """Makes sandboxes; every method raises SandboxError for its own failures."""

    name: str
    strength: IsolationStrength
    caps: DriverCapabilities
    start_kind: StartKind | None
    """Kind of a sandbox's start; None where it shows only at the first call."""
    leases: Path
    """Parent of the lease folders, which the host makes and removes."""

    async def start(self) -> None:
        """Prepare the driver.

        Raises:
            DriverUnavailableError: it cannot run on this machine.
        """

    async def stop(self) -> None:
        """End what belongs to this process; sandboxes stay for the next one."""

    def readiness(self) -> DriverReadiness:
        return ALWAYS_READY

    def keep_warm(self, wanted: Sequence[TemplateReadiness], *, max_shells: int) -> None:
        """Set the numbers of paused clones and idle VMMs to keep; templates not named keep none.

        A driver without a warm pool ignores it.

        Args:
            wanted: the numbers, by template.
            max_shells: idle VMMs that a driver may keep for a template whose saved states are
                restored.
        """
        return

    def check_startable(self, template: str) -> None:
        """Refuse a template that cannot be started now.

        Raises:
            SandboxError: it cannot; the message has the reason.
        """
        return

    def sandbox(self, folder: Path, runner: Runner, *, template: str) -> Sandbox:
        """Make the sandbox of a lease's folder, which an earlier process may have started.

        Args:
            folder: a folder below leases.
            template: name of its pool template.
            runner: runs the workspace's commands; it may call the sandbox's run().

        Raises:
            SandboxError: the sandbox of the earlier process has ended.
        """

    async def verify(self, work: Verification) -> CommandOutcome:
        """Run a verifier in a fresh sandbox."""

    def template_image(self, template: str) -> BuiltImage:
        """The image of a pool template, which gives tasks' images their kernel and agent.

        Raises:
            CapMissingError: its sandboxes have no image of their own.
        """
        raise CapMissingError(self.name, "images", "its sandboxes see this machine's programs")

    async def add_image(self, name: str, image: BuiltImage) -> ImageSize:
        """Make a task's image a template of this name; returns what that takes.

        Raises:
            CapMissingError: its sandboxes have no image of their own.
            UserError: the image cannot be started.
        """
        raise CapMissingError(self.name, "images", "its sandboxes see this machine's programs")

    async def rest_image(self, address: str) -> None:
        """Free the memory of a task's image, of which there is no sandbox; `add_image` loads it."""
        return  # a driver without images has none

    async def remove_image(self, address: str) -> None:
        """Forget a task's image, of which there is no sandbox, and remove what was made of it."""
        return  # a driver without images has none

    def left_image_sizes(self, known: Collection[str]) -> Mapping[str, int]:
        """Bytes on disk of tasks' images that an earlier process left, by address. Blocks.

        Args:
            known: addresses of those that are not asked for.
        """
        return {}

    def has_services(self, template: str) -> bool:
        """Tell whether its sandboxes run services that no agent started."""
        return False

    def repeatable_key(self, command: str) -> str:
        """Key of a command whose result follows from the files of its workspace, and of its limits.

        Empty where more decides: memory, services, other folders, other hosts.
        """
        return ""

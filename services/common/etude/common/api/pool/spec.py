"""EnvPool: environments of one kind, handed out as leases."""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from etude.common.api.meta import NAMED, Fraction, Model, Name, NameRef, Rule
from etude.common.api.observability import Observability
from etude.common.api.pool.autoscaling import DECIDED, Autoscaling, ScalingMode
from etude.common.api.pool.backend import BACKENDS, Backend
from etude.common.api.pool.environment_api import EnvironmentApi
from etude.common.api.pool.images import TaskImages
from etude.common.api.pool.lease_classes import LeaseClass
from etude.common.api.pool.network import EgressPolicy, Network
from etude.common.api.pool.placement import Placement
from etude.common.api.pool.size_rules import SIZES
from etude.common.api.pool.warm_pool import MAX_SHELLS, Warm
from etude.common.api.storage import StoreAccess
from etude.common.pools.broker_shards import MAX_SHARDS

IMAGE = r"^(file:///[^\s]+|s3://[^\s]+/[0-9a-f]{32}|[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)$"

CPU = r"^[0-9]+(\.[0-9]+)?m?$"
BACKEND = r"^(hashed-1|minilm-l6-v2|trained-[0-9a-f]{16})$"
_PORT = r"([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
SERVICE_URL = rf"^https?://[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?(:{_PORT})?(/[^\s?#@]*)?$"
MODELS = PREFIX = r"^(file:///|s3://)[^\s]+$"


class Trust(StrEnum):
    """Origin of the code that runs in a template."""

    TRUSTED = "Trusted"
    UNTRUSTED = "Untrusted"


class IsolationLevel(StrEnum):
    """The weakest wall that a pool accepts."""

    MICRO_VM = "MicroVM"
    SANDBOX = "Sandbox"
    PROCESS = "Process"


class DriverName(StrEnum):
    """Driver that makes the environments."""

    AUTO = "Auto"
    QEMU_MICRO_VM = "QemuMicroVM"
    FIRECRACKER = "Firecracker"
    GVISOR = "GVisor"
    PROCESS = "Process"


def _unless(drivers: tuple[DriverName, ...], cel: str) -> str:
    """CEL for: the pool names none of these drivers, or this holds."""
    names = [str(driver) for driver in drivers]
    driver = "self.isolation.driver"
    return f"!has(self.isolation) || !has({driver}) || !({driver} in {names}) || ({cel})"


_BOUND_TO_A_NODE = (DriverName.QEMU_MICRO_VM, DriverName.FIRECRACKER, DriverName.GVISOR)
_PREPARE_NOTHING = (DriverName.GVISOR, DriverName.PROCESS)


class Template(Model):
    """Template that environments of this pool start from."""

    name: Name
    """Name that tasks ask for."""
    image: Annotated[str, Field(max_length=512, pattern=IMAGE)] | None = None
    """What a microVM boots: an image of the pool's store, as `etude images push` prints it, or the
    name or folder of one that `etude images build` made on the host. Without it environments see
    the host's own programs."""
    trust: Trust = Trust.UNTRUSTED
    """Untrusted templates are refused by drivers whose isolation is weak."""
    egress: Annotated[tuple[Name, ...], Field(max_length=6)] | None = None
    """Names of the pool's network rules that its environments may use: all unless set, and with an
    empty list none."""
    warm_per_replica: Annotated[int, Field(ge=0, le=64)] = 0
    """Environments that each host keeps ready, whatever is planned; each takes about 17 MiB. GVisor
    and Process prepare none and refuse it."""


class Isolation(Model):
    """Isolation of environments from each other and from their host."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.driver != 'GVisor' || self.minimum != 'MicroVM'",
            holds=lambda s: (
                s.driver is not DriverName.GVISOR or s.minimum is not IsolationLevel.MICRO_VM
            ),
            message="a container of driver GVisor is a weaker wall than MicroVM",
            fix="set minimum to Sandbox, or take driver: QemuMicroVM",
            field_path=".minimum",
        ),
        Rule(
            cel="self.driver != 'Process' || self.minimum == 'Process'",
            holds=lambda s: (
                s.driver is not DriverName.PROCESS or s.minimum is IsolationLevel.PROCESS
            ),
            message="driver Process is the weakest wall: it needs minimum Process",
            fix="set minimum to Process for templates that you trust, or take another driver",
            field_path=".minimum",
        ),
    )

    minimum: IsolationLevel = IsolationLevel.MICRO_VM
    """Weakest acceptable isolation; a pool never silently gets less."""
    driver: DriverName = DriverName.AUTO
    """Auto takes QemuMicroVM where every template has an image and the host can boot it, GVisor
    where that cannot be had or is a weaker wall than the pool accepts, and Process otherwise.
    Firecracker needs KVM, and is taken by name only."""


class Slot(Model):
    """Resources of one environment."""

    cpu: Annotated[str, Field(max_length=32, pattern=CPU)] | None = None
    """CPU that a host's pod requests for each of its slots, a Kubernetes quantity; it requests
    none unless set. Environments rest between calls, so a slot needs a fraction of one."""
    memory_mib: Annotated[int, Field(ge=64, le=65_536)] | None = None
    """Memory of a microVM, 256 unless set; with GVisor what the files of its workspace may take;
    with Process what the processes of one command may take together, 1024 unless set."""
    disk_mib: Annotated[int, Field(ge=64, le=1_048_576)] | None = None
    """Disk of a microVM for what it writes over its image, in MiB: 10,240 unless set. It takes as
    much of the host's disk as is written. GVisor and Process set no such limit and refuse it."""
    processes: Annotated[int, Field(ge=16, le=32_768)] | None = None
    """Processes and threads of one command: 512 unless set, and 64 with Process."""
    open_files: Annotated[int, Field(ge=64, le=1_048_576)] | None = None
    """Files that each process may have open: 4,096 unless set, and 256 with Process."""
    file_mib: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    """Largest file that a command may write, in MiB: 1,024 unless set, and 64 with Process."""
    temporary_mib: Annotated[int, Field(ge=4, le=65_536)] | None = None
    """With Process, size of /tmp in memory, in MiB, and of the home of commands, which is there: 64
    unless set. /logs and /dev/shm get a quarter each."""
    change_mib: Annotated[int, Field(ge=1, le=64)] | None = None
    """The most that a policy may change, in MiB of changed files: 64 unless set. More ends its
    rollout as failed: CHANGE_TOO_LARGE. A run scores at most 3 MiB, whatever this says."""
    change_files: Annotated[int, Field(ge=1, le=20_000)] | None = None
    """The most files that a policy may change: 20,000 unless set."""


class Quarantine(StrEnum):
    """Treatment of a host that is not healthy."""

    ALWAYS = "Always"
    NEVER = "Never"


class Health(Model):
    """Limits after which a host gives up a template, and a pool a host."""

    readiness_grace_seconds: Annotated[int, Field(ge=10, le=86_400)] | None = None
    """A host whose containers run and that is not ready so long is unhealthy: 300 unless set."""
    crash_loop_threshold: Annotated[int, Field(ge=1, le=100)] | None = None
    """VMs of a template that crash one after the other as they start, before the host leaves it
    alone for a while; and restarts of a host in a row, before it is unhealthy: 5 unless set.
    GVisor and Process start no VMs and refuse it."""
    unschedulable_recheck_seconds: Annotated[int, Field(ge=1, le=86_400)] | None = None
    """Once a host has waited for a node for so long the pool makes no more, until none waits: 60
    unless set."""
    quarantine: Quarantine | None = None
    """Always, unless set: an unhealthy host is kept for an hour for inspection, with another in its
    place; one in ten, and one in any case. Never: it is deleted and replaced."""


class LeasePolicy(Model):
    """Rules for leases of environments."""

    ttl_seconds: Annotated[int, Field(ge=45, le=86_400)] = 300
    """A lease ends after this unless renewed, every 15 s: so long a lost client keeps its slots,
    and its environments run. A trainer that starts again within it goes on in them."""
    max_queue: Annotated[int, Field(ge=1, le=100_000)] = 10_000
    """Environments that may wait; more are refused with a retry hint."""
    max_per_run: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Environments that one run may hold and wait for; more are refused with a retry hint. Without
    it one run may take the whole pool while no other run asks."""
    classes: Annotated[tuple[LeaseClass, ...], Field(max_length=4), NAMED] = ()
    """What each use of the pool gets of its slots. Classes that are not listed have weight 1 and no
    floor."""
    queue_timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600
    """Longest wait for a slot where a client sets none. A run's rollouts wait for four of their own
    time limits, and at least 600 s; a verifier waits for its own."""


class SearchSettings(Model):
    """Embedding of the tool codebase_search: part of what a policy is trained with."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.backend.startsWith('trained-') == has(self.models)",
            holds=lambda s: s.backend.startswith("trained-") == (s.models is not None),
            message="a trained backend needs models, and no other one reads it",
            fix="set models to the folder of the trained encoders, or remove it",
            field_path=".models",
        ),
    )

    backend: Annotated[str, Field(max_length=32, pattern=BACKEND)] = "hashed-1"
    """Where vectors come from: hashed-1 needs no model, minilm-l6-v2 is a packaged sentence model,
    trained-… an encoder that `make search-model` wrote. A host without this one does not start."""
    models: Annotated[str, Field(max_length=512, pattern=MODELS)] | None = None
    """Folder with the trained encoder of that name."""
    service: Annotated[str, Field(max_length=512, pattern=SERVICE_URL)] | None = None
    """URL of a code search service, such as http://search.team:7070: the shadow of the one that
    the product serves. It answers searches in place of the hosts, and must have this backend."""


class EnvPoolSpec(Model):
    """Desired state of a pool."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *SIZES,
        *BACKENDS,
        Rule(
            cel="self.templates.all(t, !has(t.egress) || t.egress.all(n, has(self.network) &&"
            " has(self.network.rules) && self.network.rules.exists(r, r.name == n)))",
            holds=lambda s: all(
                name in {rule.name for rule in s.network.listed}
                for template in s.templates
                for name in template.egress or ()
            ),
            message="every templates[].egress must name an entry of network.rules",
            fix="name an entry of network.rules, or add one of that name",
            field_path=".templates",
        ),
        Rule(
            cel=_unless(_BOUND_TO_A_NODE, "!has(self.snapshotsUri)"),
            holds=lambda s: s.snapshots_uri is None or s.isolation.driver not in _BOUND_TO_A_NODE,
            message="snapshots of this isolation.driver hold memory that is of use on their own"
            " host only: it takes no snapshotsUri",
            fix="remove snapshotsUri, or take isolation.driver: Process",
            field_path=".snapshotsUri",
        ),
        Rule(
            cel=_unless(
                (DriverName.GVISOR,),
                "!has(self.network) || !has(self.network.egress) || self.network.egress == 'None'",
            ),
            holds=lambda s: (
                s.network.egress is EgressPolicy.NONE or s.isolation.driver is not DriverName.GVISOR
            ),
            message="environments of isolation.driver GVisor have no way out: network.egress must"
            " be None",
            fix="set egress to None, or take isolation.driver: QemuMicroVM",
            field_path=".network.egress",
        ),
        Rule(
            cel=_unless((DriverName.PROCESS,), "!has(self.images)"),
            holds=lambda s: s.images is None or s.isolation.driver is not DriverName.PROCESS,
            message="environments of isolation.driver Process see the host's own programs: it takes"
            " no images",
            fix="remove images, or take isolation.driver: GVisor",
            field_path=".images",
        ),
        Rule(
            cel=_unless(
                _PREPARE_NOTHING, "!has(self.health) || !has(self.health.crashLoopThreshold)"
            ),
            holds=lambda s: (
                s.health.crash_loop_threshold is None or s.isolation.driver not in _PREPARE_NOTHING
            ),
            message="this isolation.driver starts no VMs that could crash one after the other",
            fix="remove crashLoopThreshold, or take isolation.driver: QemuMicroVM",
            field_path=".health.crashLoopThreshold",
        ),
        Rule(
            cel=_unless(
                _PREPARE_NOTHING,
                "!has(self.warm) || (self.warm.shellsPerReplica == 0"
                f" && self.warm.maxShellsPerReplica == {MAX_SHELLS})",
            ),
            holds=lambda s: s.warm == Warm() or s.isolation.driver not in _PREPARE_NOTHING,
            message="this isolation.driver starts every environment anew and prepares none: it"
            " takes no shellsPerReplica and no maxShellsPerReplica",
            fix="remove warm, or take isolation.driver: QemuMicroVM",
            field_path=".warm",
        ),
        Rule(
            cel=_unless(
                _PREPARE_NOTHING,
                "self.templates.all(t, !has(t.warmPerReplica) || t.warmPerReplica == 0)",
            ),
            holds=lambda s: (
                not any(template.warm_per_replica for template in s.templates)
                or s.isolation.driver not in _PREPARE_NOTHING
            ),
            message="this isolation.driver starts every environment anew: it takes no"
            " warmPerReplica",
            fix="remove warmPerReplica, or take isolation.driver: QemuMicroVM",
            field_path=".templates",
        ),
    )

    backend: Backend = Backend.PODS
    """What its hosts are. It stays as it was made."""
    sandbox_template_ref: NameRef | None = None
    """SandboxTemplate of the namespace that hosts of backend AgentSandbox are made by: its pod is
    laid over ours, whose container is called node. A change is for hosts that come."""
    templates: Annotated[tuple[Template, ...], Field(min_length=1, max_length=64), NAMED]
    """Templates that this pool serves."""
    images: TaskImages | None = None
    """Images that tasks name by digest: hosts pull them when a task needs one, and the template
    gives the rest of the machine. Without it tasks use the templates' images alone."""
    isolation: Isolation = Field(default_factory=Isolation)
    """Isolation of environments from each other and from their host."""
    replicas: Annotated[int, Field(ge=0, le=10_000)] | None = None
    """Environment hosts of a pool that does not size itself: 1 unless set."""
    max_replicas: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """The most hosts in every mode; a pool that sizes itself needs it."""
    min_idle: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """Slots that a pool that sizes itself has beside those that are leased: 0 unless set."""
    overcommit_factor: Fraction | None = None
    """A pool that sizes itself never has more hosts than demand of late times this: 1.5 unless
    set. It guards against mistakes of the operator, and shows as condition HardCapped."""
    autoscaling: Autoscaling | None = None
    """How the number of hosts follows demand. Without it, mode Manual: as many as replicas says."""
    slots_per_replica: Annotated[int, Field(ge=1, le=1_024)] = 64
    """Environments that one host runs at once."""
    warm: Warm = Field(default_factory=Warm)
    """What each host keeps half started; plans and shortages ask for more. GVisor and Process
    prepare nothing and refuse it."""
    brokers: Annotated[int, Field(ge=1, le=MAX_SHARDS)] = 1
    """Processes that grant leases: one grants some 3,500 environments a second, and several share
    the hosts. All take every call of every run, and their number may change at any time."""
    placement: Placement = Field(default_factory=Placement)
    """Nodes that its hosts run on."""
    edge: EnvironmentApi | None = None
    """Serves sandboxes over HTTP as well."""
    slot: Slot = Field(default_factory=Slot)
    """Resources of one environment."""
    search: SearchSettings = Field(default_factory=SearchSettings)
    """How environments search code."""
    network: Network = Field(default_factory=Network)
    """What environments may reach."""
    health: Health = Field(default_factory=Health)
    """When a host gives something up."""
    lease: LeasePolicy = Field(default_factory=LeasePolicy)
    """Rules for leases of environments."""
    store: StoreAccess | None = None
    """How hosts reach tasks behind s3://; a run's own pool takes the run's storage unless set."""
    snapshots_uri: Annotated[str, Field(max_length=512, pattern=PREFIX)] | None = None
    """Where hosts share snapshots, so that these outlive them: a prefix of the store, or a folder
    that all hosts see, for this pool alone. Without it none are shared."""
    observability: Observability = Field(default_factory=Observability)
    """Where signals go; a run's own pool takes the run's unless set."""

    @property
    def mode(self) -> ScalingMode:
        """Source of the number of hosts."""
        return ScalingMode.MANUAL if self.autoscaling is None else self.autoscaling.mode

    @property
    def is_sized_for_demand(self) -> bool:
        """True if the operator decides on the number of hosts."""
        return self.mode in DECIDED

    @property
    def asked_replicas(self) -> int:
        """Number of hosts that a user or another autoscaler set."""
        return 1 if self.replicas is None else self.replicas

    @property
    def is_released(self) -> bool:
        """True if the pool has no pods at all: no host is asked for, and no request waits."""
        return self.mode is ScalingMode.MANUAL and not self.asked_replicas

"""PolicyRoute: a policy that is served to users, by channels of checkpoints."""

from typing import Annotated, ClassVar

from pydantic import Field

from etude.common.api.meta import LabelValue, Model, Name, NameRef, ObjectName, Rule, Uri
from etude.common.api.pool.placement import Toleration
from etude.common.api.route.release import RouteCanary, RouteGate, RoutePolicy
from etude.common.api.run.role_spec import CPU, IMAGE, MEMORY, EngineRole
from etude.common.api.run.spec import PRINTABLE


class RouteRunRef(Model):
    """The run whose versions a route serves."""

    name: Name
    """Its metadata.name, in the route's namespace."""


class EngineLending(Model):
    """Forecast by which engines of users are lent to rollouts of the run that a route serves."""

    min_replicas: Annotated[int, Field(ge=1, le=1_024)] = 1
    """Engines that are never lent."""
    turns_per_engine: Annotated[int, Field(ge=1, le=100_000)]
    """Turns of users that one engine may sample at once: with more of them each is too slow. A
    third more than the highest number of the window is kept ready."""
    window_seconds: Annotated[int, Field(ge=1, le=86_400)] = 300
    """Time for which a turn counts as demand; an engine that started later than that is not yet
    known, and nothing is lent."""


class Channels(Model):
    """Engines by the channel that they follow."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.lending) || !has(self.stable.replicas)"
            " || self.lending.minReplicas <= self.stable.replicas",
            holds=lambda s: s.lending is None or s.lending.min_replicas <= s.stable.replicas,
            message="lending.minReplicas must not be above stable.replicas",
            fix="lower lending.minReplicas, or raise stable.replicas",
            field_path=".lending.minReplicas",
        ),
    )

    stable: EngineRole
    """Engines of all users but those of an experiment's treatment."""
    canary: EngineRole | None = None
    """Engines of the users who try a candidate; without them nothing is tried."""
    lending: EngineLending | None = None
    """Lends engines of `stable` to rollouts of the run while users do without them; none are
    without it."""

    @property
    def by_name(self) -> dict[str, EngineRole]:
        """Channels that have engines, by their names."""
        named = {"stable": self.stable, "canary": self.canary}
        return {name: engines for name, engines in named.items() if engines is not None}


class ServicePods(Model):
    """Size and placement of a service's pods."""

    image: Annotated[str, Field(min_length=1, max_length=512, pattern=IMAGE)] | None = None
    """Container image; the chart's default unless set."""
    cpu: Annotated[str, Field(max_length=32, pattern=CPU)] | None = None
    """CPU request per pod, a Kubernetes quantity."""
    memory: Annotated[str, Field(max_length=32, pattern=MEMORY)] | None = None
    """Memory request and limit per pod, a Kubernetes quantity."""
    node_selector: dict[str, LabelValue] = Field(default_factory=dict, max_length=64)
    """Labels that a node must carry."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=16)] = ()
    """Taints that do not keep pods away."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods."""
    keys_ref: NameRef
    """Secret whose entry `keys` has a line for each API key, as `etude-gateway key` and
    `etude-feedback key` print it."""
    tls_ref: NameRef | None = None
    """Secret with tls.crt and tls.key of the port for clients; needed unless the chart's tls.mode
    is Plaintext."""


class GatewayLimits(Model):
    """Bounds of what one gateway process takes and keeps."""

    body_mib: Annotated[int, Field(ge=1, le=64)] = 8
    """Largest request."""
    session_tokens: Annotated[int, Field(ge=1, le=1_000_000_000)] = 8_000_000
    """Tokens of the turns that can be continued; each counts all before its end."""
    waiting_mib: Annotated[int, Field(ge=0, le=4_096)] = 64
    """Records that wait for the store; further turns are served and not recorded."""
    outage_seconds: Annotated[int, Field(ge=1, le=3_600)] = 30
    """A turn fails once no engine has sampled anything for so long."""
    turn_seconds: Annotated[int, Field(ge=1, le=86_400)] = 1_800
    """A call to an engine is ended after so long."""


class GatewayService(ServicePods):
    """The service that users' clients talk to."""

    replicas: Annotated[int, Field(ge=1, le=256)] = 2
    """Pods, each of one process; they share the quotas of the keys."""
    limits: GatewayLimits = Field(default_factory=GatewayLimits)
    """Bounds of what one process takes and keeps."""
    record_turns: bool = False
    """True records the turns of users who consent in the run's store, as tokens, sealed under keys
    of the users that an erasure of feedback destroys; of turns in which redaction finds something
    no tokens are recorded. Nothing is recorded, and nothing trained on, without it."""


class FeedbackWindows(Model):
    """Limits at which a window of users' rollouts is closed, to train on."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.minRollouts <= self.rollouts",
            holds=lambda s: s.min_rollouts <= s.rollouts,
            message="minRollouts must not be above rollouts",
            fix="lower minRollouts, or raise rollouts",
            field_path=".minRollouts",
        ),
    )

    rollouts: Annotated[int, Field(ge=2, le=10_000)] = 1_000
    """Rollouts of a full window."""
    min_rollouts: Annotated[int, Field(ge=2, le=10_000)] = 100
    """Rollouts of a window that is closed by its age."""
    max_age_seconds: Annotated[int, Field(ge=1, le=2_592_000)] = 7_200
    """Age at which a window is closed although it is not full."""
    horizon_seconds: Annotated[int, Field(ge=1, le=2_592_000)] = 3_600
    """Time after a rollout's last turn in which its signals come."""
    outcome_seconds: Annotated[int, Field(ge=0, le=2_592_000)] = 0
    """Time after a rollout's last turn or edit in which its task ends, such as by a merge: a
    rollout with edits waits as long for that; 0 waits for no end."""
    tenant: Annotated[str, Field(min_length=1, max_length=128, pattern=PRINTABLE)] | None = None
    """Tenant of a branch: rollouts of others are served, and never trained. Those of all tenants
    train unless set."""


class FeedbackService(ServicePods):
    """The service that takes users' feedback; there is one of it."""

    secret_ref: NameRef
    """Secret whose entry `secret` has the 64 hexadecimal digits that names and keys of users are
    derived from. It never changes: feedback would be unreadable."""
    key_store_uri: Uri
    """Folder or bucket of the users' keys, outside the run's storage and without versions of
    objects and backups: erasure destroys keys. It is reached as the run's storage is."""
    windows: FeedbackWindows = Field(default_factory=FeedbackWindows)
    """Limits at which windows of users' rollouts are closed, to train on."""
    turn_retention_seconds: Annotated[int, Field(ge=86_400, le=315_360_000)] | None = None
    """Age at which recorded turns are removed, and the rollouts that windows train on; unless set,
    30 days, or as long as they are needed if that is longer."""


def _is_retention_long_enough(spec: "PolicyRouteSpec") -> bool:
    kept_s, windows = spec.feedback.turn_retention_seconds, spec.feedback.windows
    settled_s = 10 * windows.horizon_seconds + windows.outcome_seconds
    read_s = settled_s + windows.max_age_seconds + spec.canary.max_seconds + 86_400
    return kept_s is None or kept_s >= read_s


class PolicyRouteSpec(Model):
    """A policy that is served, and what is learnt about it."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.feedback.turnRetentionSeconds) || self.feedback.turnRetentionSeconds"
            " >= 10 * self.feedback.windows.horizonSeconds"
            " + self.feedback.windows.outcomeSeconds + self.feedback.windows.maxAgeSeconds"
            " + self.canary.maxSeconds + 86400",
            holds=_is_retention_long_enough,
            message="turnRetentionSeconds must be at least 10 horizonSeconds, outcomeSeconds,"
            " maxAgeSeconds, canary.maxSeconds and a day together",
            fix="raise turnRetentionSeconds, or leave it out",
            field_path=".feedback.turnRetentionSeconds",
        ),
    )

    run_ref: RouteRunRef
    """The run whose versions are served; it may be over. Its storage is the route's, engines have
    its model and its settings of weights, and its network.policy is that of the route's pods. It
    never changes."""
    model: Annotated[str, Field(min_length=1, max_length=253, pattern=PRINTABLE)] | None = None
    """Name by which clients ask for the policy; the route's own unless set."""
    channels: Channels
    """Engines by the channel that they follow."""
    gateway: GatewayService
    """The service that users' clients talk to."""
    feedback: FeedbackService
    """The service that takes users' feedback, and decides which version they are served."""
    policy: RoutePolicy = RoutePolicy.AUTOMATIC
    """Decisions that need no person: all of them, all but promotion (Manual), or roll-backs alone
    (Frozen)."""
    gate: RouteGate = Field(default_factory=RouteGate)
    """Evaluation that a candidate must pass before users see it."""
    canary: RouteCanary = Field(default_factory=RouteCanary)
    """Comparison with users that a candidate must win."""

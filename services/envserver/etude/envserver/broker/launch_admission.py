"""Admission of launches: validation, template of the task's image, limits of a run and a queue."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from etude.agent.toolsets import toolset
from etude.common.api.pool.spec import EnvPoolSpec, LeasePolicy, Template
from etude.common.errors import FullError, InvalidFieldError, UserError
from etude.common.pinned_images import is_pinned, is_within, parse_pinned
from etude.v1 import environments_pb2

MAX_COUNT = 1024
MAX_TTL_S = 86_400
MAX_BATCHES = 20_000
"""Concurrent launches. Each holds a stream of some tens of KiB, however few it asks for."""
MAX_NAME = 253
WINDOW_S = 10.0
"""Window of the grant rate."""
LEAST_RETRY_S, MOST_RETRY_S = 0.5, 30.0
UNKNOWN_RETRY_S = 2.0
"""While nothing was granted in the window."""


def check_launch(
    request: environments_pb2.LaunchBatchRequest, templates: Collection[str], policy: LeasePolicy
) -> None:
    """Reject a launch that can never be served.

    Raises:
        InvalidFieldError: naming the field.
    """
    names = ", ".join(sorted(templates))
    most = min(MAX_COUNT, policy.max_per_run or MAX_COUNT)
    rules = (
        ("run_id", 0 < len(request.run_id) <= MAX_NAME, f"must have 1 to {MAX_NAME} characters"),
        ("idempotency_key", bool(request.idempotency_key), "is empty"),
        ("template", request.template in templates, f"is none of {names}"),
        ("count", 1 <= request.count <= most, f"must be between 1 and {most}"),
        ("ttl_seconds", request.ttl_seconds <= MAX_TTL_S, f"must be at most {MAX_TTL_S}"),
        ("group_id", len(request.group_id) <= MAX_NAME, f"has more than {MAX_NAME} characters"),
        ("deadline_unix_ms", request.deadline_unix_ms >= 0, "must not be negative"),
        (
            "workspace.uri",
            request.workspace.uri.startswith(("file://", "s3://"))
            or request.workspace.uri == "empty:"
            or bool(request.snapshot_id),
            "must be a file:// or s3:// URI, or empty:",
        ),
    )
    _refuse_broken(rules)
    toolset(request.toolset)


def check_group_request(
    request: environments_pb2.PrepareGroupRequest, templates: Collection[str]
) -> None:
    """Reject a group that could not be launched.

    Raises:
        InvalidFieldError: naming the field.
    """
    rules = (
        ("run_id", 0 < len(request.run_id) <= MAX_NAME, f"must have 1 to {MAX_NAME} characters"),
        (
            "group_id",
            0 < len(request.group_id) <= MAX_NAME,
            f"must have 1 to {MAX_NAME} characters",
        ),
        ("template", request.template in templates, f"is none of {', '.join(sorted(templates))}"),
        ("count", 1 <= request.count <= MAX_COUNT, f"must be between 1 and {MAX_COUNT}"),
    )
    _refuse_broken(rules)


def _refuse_broken(rules: Iterable[tuple[str, bool, str]]) -> None:
    for name, holds, what in rules:
        if not holds:
            raise InvalidFieldError(name, what)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerLoad:
    """Load of a broker when a launch arrives."""

    wanted: int
    """Environments that it asks for and does not hold already."""
    waiting: int
    free: int
    batches: int
    held_by_run: int
    """Environments that its run holds or waits for."""


def excess_of(load: BrokerLoad, policy: LeasePolicy) -> tuple[int, str]:
    """Environments by which a launch exceeds a limit, and the limit's name; 0 if it may enter."""
    if policy.max_per_run is not None:
        run_over = load.held_by_run + load.wanted - policy.max_per_run
        if run_over > 0:
            return run_over, (
                f"the run holds or waits for {load.held_by_run} environments already; this pool"
                f" gives a run {policy.max_per_run}"
            )
    queue_over = load.waiting + load.wanted - load.free - policy.max_queue
    if queue_over > 0:
        what = f"{load.waiting} environments wait already; this pool queues {policy.max_queue}"
        return queue_over, what
    if load.batches >= MAX_BATCHES:
        return 1, f"{load.batches} launches are in progress, the most that a broker takes"
    return 0, ""


@dataclass(slots=True)
class GrantRate:
    """Rate at which environments are granted."""

    _grants: deque[tuple[float, int]] = field(default_factory=deque)
    """When and how many, of the last window."""
    _count: int = 0

    def record_grants(self, count: int, *, now_s: float) -> None:
        self._grants.append((now_s, count))
        self._count += count
        self._forget(now_s)

    def per_second(self, *, now_s: float) -> float:
        """Grants per second over the last window."""
        self._forget(now_s)
        return self._count / WINDOW_S

    def retry_after_s(self, places: int, *, now_s: float) -> float:
        """Estimated seconds until this many slots become free."""
        rate = self.per_second(now_s=now_s)
        expected_s = places / rate if rate else UNKNOWN_RETRY_S
        return min(MOST_RETRY_S, max(LEAST_RETRY_S, expected_s))

    def _forget(self, now_s: float) -> None:
        while self._grants and now_s - self._grants[0][0] > WINDOW_S:
            self._count -= self._grants.popleft()[1]


def refuse_excess(load: BrokerLoad, policy: LeasePolicy, drain: GrantRate, *, now_s: float) -> None:
    """Reject a launch that would exceed a limit.

    Raises:
        FullError: with the time after which it may fit.
    """
    over, what = excess_of(load, policy)
    if over:
        raise FullError(what, retry_after_s=drain.retry_after_s(over, now_s=now_s))


def with_image_template(
    request: environments_pb2.LaunchBatchRequest, spec: EnvPoolSpec
) -> environments_pb2.LaunchBatchRequest:
    """The launch request with the template whose image its task needs.

    It is unchanged without an image, and with one by its digest, which hosts pull.

    Raises:
        InvalidFieldError: the pool has no such image, or takes none from there.
    """
    if not request.image:
        return request
    if is_pinned(request.image):
        _check_pinned(request.image, spec)
        return request
    templates = spec.templates
    fitting = [each.name for each in templates if has_image(each, request.image)]
    if not fitting:
        raise InvalidFieldError("image", _refusal(request, templates))
    if request.template in fitting:
        return request
    found = environments_pb2.LaunchBatchRequest()
    found.CopyFrom(request)
    found.template = fitting[0]
    return found


def _check_pinned(reference: str, spec: EnvPoolSpec) -> None:
    """Refuse an image by its digest that this pool does not take.

    Raises:
        InvalidFieldError: it does not.
    """
    try:
        image = parse_pinned(reference)
    except UserError as cause:
        raise InvalidFieldError("image", str(cause)) from cause
    sources = () if spec.images is None else spec.images.sources
    if not is_within(image, sources):
        what = f"this pool takes no images of {image.source}: add it to spec.images.sources"
        raise InvalidFieldError("image", what)


def has_image(template: Template, image: str) -> bool:
    """True if a template's environments boot this image.

    A task names an image as its recipe did. A template names it the same way, by its folder, or by
    its address in a store, which has no name: then the template's own name is the image's.
    """
    if template.image is None:
        return False
    return image in {template.name, template.image, template.image.rpartition("/")[2]}


def _refusal(request: environments_pb2.LaunchBatchRequest, templates: Sequence[Template]) -> str:
    task = request.workspace.uri.removesuffix("/environment")
    present = ", ".join(f"{each.name} ({each.image or 'no image'})" for each in templates)
    return (
        f"task {task} needs image {request.image!r}, and no template of this pool has it:"
        f" {present}. Build it (etude images build), push it, and add a template"
        f" {{name: {request.image}, image: s3://…}} to spec.templates of the pool"
    )

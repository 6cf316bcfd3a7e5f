"""Table of runs: resources that they hold, and their step rates."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass

from pydantic.alias_generators import to_camel
from rich.table import Table

from etude.cli.kubectl.diagnose.pods import is_ready
from etude.cli.kubectl.diagnose.run_objects import RunObjects, checkpoint_facts, steps_per_hour
from etude.cli.kubectl.manifests import Manifest, is_terminating, name_of

GPU = "nvidia.com/gpu"
"""GPU resource of a role without gpuResource."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunUsage:
    """Usage of one run."""

    namespace: str
    name: str
    status: str
    phase: str
    step: str
    gpus: int
    """GPUs that its pods request, those without a node included."""
    pods: int
    ready: int
    leases: int
    """Leased environments of its pools, by all runs."""
    steps_per_hour: float | None
    """Between its newest two checkpoints, pauses included; None before there are two."""

    def as_json(self) -> dict[str, object]:
        """The usage for programs, in camelCase."""
        return {to_camel(name): value for name, value in asdict(self).items()}


def run_usage(seen: RunObjects) -> RunUsage:
    """The usage of one run."""
    status = seen.status
    staying = [pod for pod in seen.pods if not is_terminating(pod)]
    resources = gpu_resources(seen.run)
    return RunUsage(
        namespace=seen.run["metadata"]["namespace"],
        name=seen.name,
        status=status.phase,
        phase=status.active_phase,
        step=status.step.text if status.step is not None else "",
        gpus=sum(gpus_of(pod, resources) for pod in staying),
        pods=len(staying),
        ready=sum(map(is_ready, staying)),
        leases=sum(each.leased for each in status.environments),
        steps_per_hour=steps_per_hour(seen.checkpoints),
    )


def gpu_resources(run: Manifest) -> set[str]:
    """Names of GPU resources in a run's roles, such as amd.com/gpu or a slice of MIG."""
    roles = (run["spec"].get("roles") or {}).values()
    single = [role for role in roles if isinstance(role, Mapping)]
    return {GPU, *(role["gpuResource"] for role in single if role.get("gpuResource"))}


def gpus_of(pod: Manifest, resources: Collection[str]) -> int:
    """Whole GPUs that a pod requests, by the names of their resources."""
    requests = (
        container.get("resources", {}).get("requests") or {}
        for container in pod["spec"].get("containers", ())
    )
    return sum(int(each.get(name, 0)) for each in requests for name in resources)


KEYS: Mapping[str, Callable[[RunUsage], float]] = {
    "gpus": lambda line: -line.gpus,
    "pods": lambda line: -line.pods,
    "leases": lambda line: -line.leases,
    "steps": lambda line: -(line.steps_per_hour or 0.0),
    "name": lambda _line: 0,
}
"""Sort keys of the table, the largest first; ties by namespace and name."""


def sort_usages(lines: Iterable[RunUsage], by: str) -> list[RunUsage]:
    """The usages in the order of one of KEYS."""
    return sorted(lines, key=lambda line: (KEYS[by](line), line.namespace, line.name))


def usage_table(lines: Iterable[RunUsage], *, with_namespace: bool) -> Table:
    """The usages as a table for people."""
    table = Table(box=None, pad_edge=False)
    titles = ("NAME", "STATUS", "PHASE", "STEP", "GPUS", "PODS", "LEASES", "STEPS/H")
    for title in ("NAMESPACE", *titles) if with_namespace else titles:
        table.add_column(title, justify="right" if title in titles[4:] else "left", no_wrap=True)
    for line in lines:
        cells = [line.name, line.status, line.phase, line.step, str(line.gpus)]
        cells += [f"{line.ready}/{line.pods}", str(line.leases), _format_rate(line.steps_per_hour)]
        table.add_row(*([line.namespace] if with_namespace else []), *cells)
    return table


def checkpoints_table(checkpoints: Iterable[Manifest]) -> Table:
    """Checkpoints as a table for people."""
    table = Table(box=None, pad_edge=False)
    for title in ("NAME", "STEP", "POLICY", "REASON", "PHASE", "SIZE", "PINNED", "SAVED"):
        table.add_column(title, justify="right" if title in {"STEP", "SIZE"} else "left")
    for each in checkpoints:
        spec, status, what = each["spec"], each.get("status") or {}, checkpoint_facts(each)
        table.add_row(
            name_of(each),
            str(what["step"]),
            str(what["policyVersion"]),
            spec["reason"],
            status.get("phase", ""),
            f"{what['sizeBytes'] / 2**20:,.1f} MiB",
            "yes" if spec.get("pinned") else "",
            each["metadata"].get("creationTimestamp", ""),
        )
    return table


def _format_rate(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"

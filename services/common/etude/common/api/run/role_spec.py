"""Settings of a role: pods, placement, and engines."""

from typing import Annotated, ClassVar

from pydantic import Field

from etude.common.api.meta import (
    NAMED,
    QUALIFIED,
    SUBDOMAIN,
    LabelValue,
    Model,
    ObjectName,
    Rule,
)
from etude.common.api.pool.placement import Toleration
from etude.common.api.run.engine_settings import EngineSettings
from etude.common.api.run.pod_template import PodTemplate, ResourceClaim

DEFAULT_GRACE_S = 60
RESOURCE = rf"^{SUBDOMAIN}/{QUALIFIED}$"
IMAGE = r"^[!-~]+$"
"""Blanks are in no reference, and Kubernetes refuses a pod for those around it."""

CPU = r"^[0-9]+(\.[0-9]+)?m?$"
MEMORY = r"^[0-9]+(Ki|Mi|Gi|Ti)?$"

_SHIFTS = {"": 0, "Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}


class EnvVar(Model):
    """One environment variable."""

    name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """Its name."""
    value: Annotated[str, Field(max_length=4_096)] = ""
    """Its value; secrets belong into a Secret."""


class RoleSpec(Model):
    """Size and placement of one role's pods."""

    image: Annotated[str, Field(min_length=1, max_length=512, pattern=IMAGE)] | None = None
    """Container image; the chart's default unless set."""
    gpus_per_replica: Annotated[int, Field(ge=0, le=64)] = 0
    """Whole GPUs per pod."""
    gpu_resource: Annotated[str, Field(max_length=253, pattern=RESOURCE)] = "nvidia.com/gpu"
    """Extended resource of one GPU, for example amd.com/gpu or nvidia.com/mig-3g.40gb."""
    resource_claims: Annotated[tuple[ResourceClaim, ...], Field(max_length=8), NAMED] = ()
    """Devices by dynamic resource allocation, beside or instead of gpusPerReplica."""
    cpu: Annotated[str, Field(max_length=32, pattern=CPU)] | None = None
    """CPU request per pod, a Kubernetes quantity."""
    memory: Annotated[str, Field(max_length=32, pattern=MEMORY)] | None = None
    """Memory request and limit per pod, a Kubernetes quantity."""
    env: Annotated[tuple[EnvVar, ...], Field(max_length=128), NAMED] = ()
    """Extra environment variables."""
    node_selector: dict[str, LabelValue] = Field(default_factory=dict, max_length=64)
    """Labels that a node must carry."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=16)] = ()
    """Taints that do not keep pods away."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pods."""
    pod_template: PodTemplate = Field(default_factory=PodTemplate)
    """Whatever else pods should have: labels, annotations, affinity, topology spread, volumes."""
    termination_grace_period_seconds: Annotated[int, Field(ge=1, le=86_400)] | None = None
    """Time to end in order before a pod is killed; 60 unless set, and for the trainer, which saves
    first, checkpointing.timeoutSeconds + 30."""

    @property
    def has_gpus(self) -> bool:
        """True if its pods have devices, counted or claimed."""
        return self.gpus_per_replica > 0 or bool(self.resource_claims)

    @property
    def memory_bytes(self) -> int | None:
        """Memory of a pod; None without a limit."""
        if self.memory is None:
            return None
        digits = self.memory.rstrip("KMGTi")
        return int(digits) << _SHIFTS[self.memory[len(digits) :]]

    @property
    def grace_s(self) -> int:
        """The time to end in order of a role that saves nothing."""
        return self.termination_grace_period_seconds or DEFAULT_GRACE_S


class EngineRole(RoleSpec):
    """Engines that serve one policy."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="(has(self.engine.tensorParallel) ? self.engine.tensorParallel"
            " * self.engine.pipelineParallel * self.engine.dataParallel"
            " == (self.gpusPerReplica > 0 ? self.gpusPerReplica : 1)"
            " : (self.gpusPerReplica > 0 ? self.gpusPerReplica : 1)"
            " % (self.engine.pipelineParallel * self.engine.dataParallel) == 0)",
            holds=lambda s: s.engine.uses_gpus(s.gpus_per_replica),
            message="gpusPerReplica must be tensorParallel x pipelineParallel x dataParallel: other"
            " GPUs would idle",
            fix="change gpusPerReplica, or leave tensorParallel out",
            field_path=".engine",
        ),
        Rule(
            cel="!has(self.engine.memoryShare) || self.gpusPerReplica > 0",
            holds=lambda s: s.engine.memory_share is None or s.gpus_per_replica > 0,
            message="memoryShare is of GPU memory: it needs gpusPerReplica, and an engine on the"
            " CPU has kvCacheMib",
            fix="set kvCacheMib instead, or gpusPerReplica",
            field_path=".engine.memoryShare",
        ),
    )

    replicas: Annotated[int, Field(ge=1, le=1_024)] = 1
    """Engines, each behind its own address."""
    engine: EngineSettings = Field(default_factory=EngineSettings)
    """Parallelism, memory and numbers of each engine."""
    max_model_len: Annotated[int, Field(ge=16, le=1_048_576)] = 32_768
    """Longest prompt plus completion, in tokens."""
    max_concurrent: Annotated[int, Field(ge=1, le=4_096)] = 64
    """Requests that one engine runs at once."""
    kv_cache_mib: Annotated[int, Field(ge=16, le=1_048_576)] | None = None
    """CPU engines: memory of the KV cache; 1 GiB unless set."""

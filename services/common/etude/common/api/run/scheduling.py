"""Scheduling of a run's pods: workload, queue, priority, gangs, topology."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from etude.common.api.meta import QUALIFIED, SUBDOMAIN, Model, ObjectName, Rule

NODE_LABEL = rf"^({SUBDOMAIN}/)?{QUALIFIED}$"

NodeLabel = Annotated[str, Field(min_length=1, max_length=63, pattern=NODE_LABEL)]

Workload = Literal["StatefulSet", "JobSet", "RayCluster"]
"""What a role's pods can come from."""


class Topology(Model):
    """Topology of the pods of one role: how near to each other they are."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.required) != has(self.preferred)",
            holds=lambda s: (s.required is None) != (s.preferred is None),
            message="give exactly one of required and preferred",
            fix="keep required for pods that may not run apart, preferred for those that may",
        ),
    )

    required: NodeLabel | None = None
    """Key of a node label, for example topology.kubernetes.io/zone: every pod of a role runs where
    it has one and the same value, or not at all."""
    preferred: NodeLabel | None = None
    """The same, where the scheduler finds room."""


class Gang(Model):
    """Pods that get their nodes together or not at all."""

    provider: Literal["Volcano"]
    """Who sees to it. Volcano: its scheduler places the pods of the roles, by a PodGroup."""
    scope: Literal["Run", "PerRole"] = "Run"
    """Run waits for the pods of all roles, PerRole for those of each role by itself, which suits
    runs whose engines come and go. Environments are not part of it."""
    timeout_seconds: Annotated[int, Field(ge=1, le=604_800)] = 600
    """Time without nodes after which condition PodsScheduled says GangTimeout; the pods go on
    waiting."""


class Scheduling(Model):
    """Scheduling of the pods of a run."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.queueName) == (self.admission != 'None')",
            holds=lambda s: (s.queue_name is not None) == (s.admission != "None"),
            message="queueName needs an admission, and every admission but None a queueName",
            fix="name a LocalQueue of the namespace and set admission: JobSet, or remove both",
            field_path=".queueName",
        ),
        Rule(
            cel="self.admission != 'JobSet' || self.workload in ['Auto', 'JobSet']",
            holds=lambda s: s.admission != "JobSet" or s.workload in {"Auto", "JobSet"},
            message="admission JobSet needs workload JobSet: the queue admits the JobSet itself",
            fix="set workload: Auto",
            field_path=".workload",
        ),
        Rule(
            cel="self.admission != 'Workload' || self.workload in ['Auto', 'StatefulSet']",
            holds=lambda s: s.admission != "Workload" or s.workload in {"Auto", "StatefulSet"},
            message="admission Workload is for StatefulSets, which a queue cannot hold back itself",
            fix="set workload: Auto, or admission: JobSet",
            field_path=".workload",
        ),
        Rule(
            cel="!has(self.workloadPriorityClassName) || self.admission != 'None'",
            holds=lambda s: s.workload_priority_class_name is None or s.admission != "None",
            message="workloadPriorityClassName is a place in a queue, and with admission None the"
            " run is in none",
            fix="set admission and queueName, or remove workloadPriorityClassName",
            field_path=".workloadPriorityClassName",
        ),
        Rule(
            cel="self.admission != 'JobSet' || ((!has(self.queueName) || size(self.queueName) <="
            " 63) && (!has(self.workloadPriorityClassName)"
            " || size(self.workloadPriorityClassName) <= 63))",
            holds=lambda s: (
                s.admission != "JobSet"
                or all(len(n or "") <= 63 for n in (s.queue_name, s.workload_priority_class_name))
            ),
            message="queueName and workloadPriorityClassName of admission JobSet are labels of the"
            " JobSet, which have at most 63 characters",
            fix="take shorter names, or admission: Workload",
            field_path=".queueName",
        ),
    )

    workload: Literal["Auto", "StatefulSet", "JobSet", "RayCluster"] = "Auto"
    """What the pods of the roles come from: a StatefulSet for each role, one JobSet for the run, or
    a RayCluster of KubeRay for the trainer beside StatefulSets. Auto is StatefulSet, and JobSet
    where admission says so. A RayCluster has as many pods of the trainer's size as learnerRanks
    need; everything else has one."""
    admission: Literal["None", "JobSet", "Workload"] = "None"
    """Who lets the run have pods. JobSet: Kueue, which suspends and resumes the run's JobSet; pods
    that lose their quota save as they are told to go. Workload: Kueue too, by a Workload for which
    the StatefulSets wait; pods that lose their quota stay until a checkpoint is verified."""
    queue_name: ObjectName | None = None
    """LocalQueue of the namespace in which the run waits."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods of every role that names none of its own."""
    workload_priority_class_name: ObjectName | None = None
    """WorkloadPriorityClass of Kueue: the run's place in the queue, which pods do not have. The
    pods' priorityClassName counts there unless set."""
    idle_roles: Literal["Release", "Hold"] = "Release"
    """What engines, rewards and the run's own pools do while a supervised phase trains. Release
    lets their pods go once they were ready, if reinforcement learning is far enough away, and
    starts them again as long before it as they took to start; Hold keeps them. A JobSet and a queue
    need Hold where phases of both kinds follow each other."""
    gang: Gang | None = None
    """Pods that are placed together or not at all; each by itself unless set. A queue admits a run
    as a whole already."""
    topology: Topology | None = None
    """How near to each other the pods of one role are; the scheduler's choice unless set. With
    admission JobSet the queue places by it too, and never admits a run, not even for preferred,
    unless its flavors have a Topology of Kueue's with that node label among its levels."""

    @property
    def kind(self) -> Workload:
        if self.workload == "Auto":
            return "JobSet" if self.admission == "JobSet" else "StatefulSet"
        return self.workload

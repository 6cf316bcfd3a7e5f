"""The kinds as whole objects: metadata, spec, status."""

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from etude.common.api.checkpoint.spec import CheckpointSpec
from etude.common.api.checkpoint.status import CheckpointStatus, SavedCheckpoint
from etude.common.api.evaluation.spec import EvalRunSpec
from etude.common.api.evaluation.status import EvalRunStatus
from etude.common.api.meta import API_VERSION, Model, ObjectMeta
from etude.common.api.pool.spec import EnvPoolSpec
from etude.common.api.pool.status import EnvPoolStatus
from etude.common.api.route.spec import PolicyRouteSpec
from etude.common.api.route.status import PolicyRouteStatus
from etude.common.api.run.spec import RLRunSpec
from etude.common.api.run.status import RLRunStatus
from etude.common.api.storage import Storage


class CheckpointMeta(ObjectMeta):
    """Metadata of a checkpoint, whose name is longer than its run's."""

    name: Annotated[str, Field(min_length=1, max_length=253)]


class ApiObject(Model):
    """An object of our group as the API server returns it."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore")

    api_version: Literal["etude.dev/v1alpha1"] = "etude.dev/v1alpha1"
    """Version of this form of the object."""
    metadata: ObjectMeta
    """Name, namespace and what the API server adds."""


class RLRun(ApiObject):
    """One post-training run, from a model folder to a better policy."""

    kind: Literal["RLRun"] = "RLRun"
    """RLRun."""
    spec: RLRunSpec
    """What the run should be; the user's."""
    status: RLRunStatus = Field(default_factory=RLRunStatus)
    """What was observed; the operator's."""


class EnvPool(ApiObject):
    """Environments of one kind, handed out as leases."""

    kind: Literal["EnvPool"] = "EnvPool"
    """EnvPool."""
    spec: EnvPoolSpec
    """What the pool should be; the user's."""
    status: EnvPoolStatus = Field(default_factory=EnvPoolStatus)
    """What was observed; the operator's."""

    @property
    def run(self) -> str:
        """Name of the run that made it for itself, empty of any other pool.

        Its labels say nothing of that: users sort their pools by labels of their choice.
        """
        owners = (o for o in self.metadata.owner_references if o.controller)
        of_run = (o for o in owners if (o.api_version, o.kind) == (API_VERSION, "RLRun"))
        return next((o.name for o in of_run), "")


class Checkpoint(ApiObject):
    """One complete, verified state of a run in the object store."""

    kind: Literal["Checkpoint"] = "Checkpoint"
    """Checkpoint."""
    metadata: CheckpointMeta
    """Name, namespace and what the API server adds."""
    spec: CheckpointSpec
    """What the checkpoint is; written by the operator, or by a user for an import."""
    status: CheckpointStatus = Field(default_factory=CheckpointStatus)
    """What was observed; the operator's."""

    @property
    def saved_state(self) -> SavedCheckpoint:
        """Its content; empty for a request that is not fulfilled yet."""
        spec = self.spec
        if spec.source is None or self.status.uri:
            return self.status
        return SavedCheckpoint(
            uri=spec.source.uri,
            manifest_digest=spec.source.manifest_digest,
            step=spec.step,
            policy_version=spec.policy_version,
            keyframe=spec.keyframe,
            size_bytes=spec.size_bytes,
            branch=spec.branch,
            parent_ref=spec.parent_ref,
            metrics=spec.metrics,
        )

    @property
    def storage(self) -> Storage | None:
        """Access to its store; None for a request that is not fulfilled yet."""
        return self.spec.storage or self.status.storage


class PolicyRoute(ApiObject):
    """A policy that is served to users."""

    kind: Literal["PolicyRoute"] = "PolicyRoute"
    """PolicyRoute."""
    spec: PolicyRouteSpec
    """What is served, and how; the user's."""
    status: PolicyRouteStatus = Field(default_factory=PolicyRouteStatus)
    """What was observed; the operator's."""


class EvalRun(ApiObject):
    """One checkpoint on suites of tasks, compared with another EvalRun's result."""

    kind: Literal["EvalRun"] = "EvalRun"
    """EvalRun."""
    spec: EvalRunSpec
    """What is evaluated; the user's."""
    status: EvalRunStatus = Field(default_factory=EvalRunStatus)
    """What was observed; the operator's."""

"""Kind registry: all kinds of the operator.

To add a kind: its models and CustomResourceDefinition in `etude.common.api`, a folder with a module
`kind` that has its `ResourceKind`, and a line here.
"""

from collections.abc import Mapping
from typing import Any

from etude.operator.checkpoints.kind import CHECKPOINT
from etude.operator.evaluations.kind import EVAL_RUN
from etude.operator.kind import ResourceKind
from etude.operator.pools.kind import ENV_POOL
from etude.operator.routes.kind import POLICY_ROUTE
from etude.operator.runs.kind import RLRUN

KINDS: tuple[ResourceKind[Any, Any], ...] = (
    RLRUN,
    ENV_POOL,
    CHECKPOINT,
    POLICY_ROUTE,
    EVAL_RUN,
)
"""Owners before the kinds that they own."""

KINDS_BY_NAME: Mapping[str, ResourceKind[Any, Any]] = {kind.name: kind for kind in KINDS}

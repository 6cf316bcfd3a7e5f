"""Inputs of a role: the run or the pool that it belongs to, from a mounted file."""

import json
from pathlib import Path
from typing import TypeVar

from etude.common.api.checkpoint.spec import CheckpointSource
from etude.common.api.evaluation.spec import EvalRunSpec
from etude.common.api.meta import Model, Uri
from etude.common.api.pool.spec import EnvPoolSpec
from etude.common.api.run.spec import RLRunSpec
from etude.common.errors import Problem, UserError

M = TypeVar("M", bound=Model)


class ResumeAt(Model):
    """Checkpoint to which a run is rolled back once."""

    number: int
    """Grows with each request, so that a role carries out a request only once."""
    step: int | None = None
    """Of the checkpoint; None for the start weights."""
    branch: int = 0
    """Of the checkpoint."""


class ResolvedRun(Model):
    """An accepted run, as its ConfigMap hands it to the roles."""

    name: str
    namespace: str = "default"
    uid: str
    generation: int = 1
    spec: RLRunSpec
    resume: ResumeAt | None = None
    """None goes on from the newest checkpoint."""


class ResolvedPool(Model):
    """An accepted pool, as its ConfigMap hands it to broker and hosts."""

    name: str
    namespace: str = "default"
    uid: str
    spec: EnvPoolSpec


class ResolvedEvaluation(Model):
    """An accepted evaluation, as its ConfigMap hands it to its Job."""

    name: str
    uid: str
    spec: EvalRunSpec
    run: ResolvedRun
    """The run that wrote the checkpoint, or whose rewards and store are used."""
    checkpoint: CheckpointSource | None = None
    """None for a model at an endpoint."""
    results: Uri
    """Prefix of its results, in the run's store."""
    baseline: Uri | None = None
    """Prefix of the results to compare with, in the same store."""


def read_run(path: Path) -> ResolvedRun:
    """The run that this role belongs to.

    Raises:
        UserError: the file is missing or is no valid run.
    """
    return _read(path, ResolvedRun)


def read_pool(path: Path) -> ResolvedPool:
    """The pool that this role belongs to.

    Raises:
        UserError: the file is missing or is no valid pool.
    """
    return _read(path, ResolvedPool)


def read_evaluation(path: Path) -> ResolvedEvaluation:
    """The evaluation that this process runs.

    Raises:
        UserError: the file is missing or is no valid evaluation.
    """
    return _read(path, ResolvedEvaluation)


def _read(path: Path, model: type[M]) -> M:
    try:
        return model.parse_known_fields(json.loads(path.read_bytes()))
    except (OSError, ValueError) as cause:
        raise UserError(
            Problem(
                reason="InvalidSpec",
                what=f"cannot be read as {model.__name__}: {cause}",
                where=str(path),
                fix="apply a manifest that passes `etude lint`",
            )
        ) from cause

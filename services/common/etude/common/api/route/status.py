"""Observed state of a route."""

from typing import Annotated

from pydantic import Field

from etude.common.api.status_types import (
    Conditions,
    Count,
    Resolved,
    Short,
    StatusModel,
    Time,
)

Sentence = Annotated[str, Field(max_length=1_024)]


class ServedChannel(StatusModel):
    """A channel of a route."""

    engines: Short = ""
    """Engines that are ready, of those desired."""
    version: Short = ""
    """Version of the run that it serves; empty if none is known."""
    checkpoint: Short = ""
    """Checkpoint with that version; empty if there is none."""
    since: Time | None = None
    """When it began with that version."""


class TestedCandidate(StatusModel):
    """A comparison of the canary channel with the stable one."""

    experiment: Short = ""
    """Its name."""
    share: Short = ""
    """Users with the candidate, of all; as many are the control."""
    question: Sentence = ""
    """What a person has to decide; empty if nothing."""


class LastDecision(StatusModel):
    """The newest decision about a route's releases."""

    action: Short = ""
    """Such as Promote, Rollback or Refuse."""
    sentence: Sentence = ""
    """Why, with its figures."""
    time: Time | None = None
    """When it was made."""


class EvaluatedCandidate(StatusModel):
    """The newest checkpoint that was evaluated or tried for a route."""

    checkpoint: Short = ""
    """Its name."""
    evaluation: Short = ""
    """EvalRun whose result is proposed; empty for one that was proposed without it."""
    branch: Count = 0
    """Branch of the run that wrote the checkpoint."""
    number: Count = 0
    """Number of its policy version."""
    action: Short = ""
    """What came of it, such as StartCanary or Refuse; empty while it is evaluated."""
    sentence: Sentence = ""
    """Why."""


class AnsweredRequest(StatusModel):
    """The answer to a request that was written into an annotation of the route."""

    id: Short = ""
    """Names the request: a digest of the annotation."""
    action: Short = ""
    """What came of it: Refuse if nothing changed."""
    sentence: Sentence = ""
    """Why."""


class PolicyRouteStatus(StatusModel):
    """Observed state of a route."""

    observed_generation: Count = 0
    """Generation of the spec that this status is about."""
    phase: Annotated[str, Field(max_length=32)] = ""
    """One word, derived from the conditions; nothing is decided by it."""
    conditions: Conditions = ()
    """Facts, each with a reason."""
    run_uid: Short = ""
    """Run that is served, so that a new one of its name is not mistaken for it."""
    gateways: Short = ""
    """Gateways that are ready, of those desired."""
    stable: ServedChannel | None = None
    """What most users get."""
    canary: ServedChannel | None = None
    """What is tried."""
    test: TestedCandidate | None = None
    """How it is tried; absent while nothing is."""
    candidate: EvaluatedCandidate | None = None
    """What is evaluated, or was last."""
    policy: Annotated[str, Field(max_length=32)] = ""
    """Which decisions need no person, as the feedback service has it."""
    freeze: Sentence = ""
    """Why only roll-backs are made; empty while more is."""
    decision: LastDecision | None = None
    """The newest decision."""
    request: AnsweredRequest | None = None
    """The answer to the newest request of `kubectl etude promote` and the like."""
    resolved: Resolved | None = None
    """Defaults pinned at acceptance."""

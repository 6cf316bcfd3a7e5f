"""Input and result of one optimiser step.

Free of torch, so that the controller builds batches without loading it.
Shapes: T tokens of one sequence, R rollouts of one batch.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude.common.errors import EtudeError, InvalidFieldError
from etude.common.routed_experts import ExpertIds
from etude.common.weights import VersionId
from etude.v1 import rollout_content_pb2, rollout_pb2

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


class RefusedUpdateError(EtudeError):
    """An update was not applied, and the phase stops then; no weight changed."""


class KlLimitError(RefusedUpdateError):
    """The policy is further from the weights that sampled than klLimit."""

    reason = "KlLimit"


class NonFiniteLossError(RefusedUpdateError):
    """The loss or its gradient was NaN or infinite; the step was not applied."""

    reason = "NonFiniteLoss"


class DamagedRolloutsError(EtudeError):
    """Rollouts of a batch are gone or damaged in the store; nothing was trained."""

    reason = "DamagedRollouts"

    def __init__(self, rollouts: Mapping[str, str]) -> None:
        """Name the first of them.

        Args:
            rollouts: what is wrong with each, by its id.
        """
        first, what = min(rollouts.items())
        super().__init__(f"{len(rollouts)} rollouts cannot be read; {first}: {what}")
        self.rollouts = dict(rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedSequence:
    """One transcript or text to imitate."""

    token_ids: Ints
    """[T]"""
    weights: Floats
    """Loss weight of predicting each token; the first is never predicted. [T]"""

    def __post_init__(self) -> None:
        _same_length("weights", self.token_ids, self.weights)
        if not np.isfinite(self.weights).all() or (self.weights < 0).any():
            raise InvalidFieldError("weights", "must be finite and not negative")


class StoredRoutes(NamedTuple):
    """Place of the recorded experts of one link, in the run's store."""

    key: str
    digest: str
    """BLAKE3 of the object, hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySequence:
    """One link of a rollout, exactly as it was sampled."""

    token_ids: Ints
    """[T]"""
    loss_mask: Bools
    """True where the policy sampled the token. [T]"""
    sampler_logprobs: Floats
    """Recorded at sampling; read only where the mask is true. [T]"""
    rollout: int
    """Its rollout's place in the batch's rewards."""
    is_current: Bools | None = None
    """True where the weights of this step sampled the token over a context that they computed too;
    None: nowhere. [T]"""
    routes: ExpertIds | None = None
    """Experts that each token took where it was sampled, in each layer that has some; the live
    routers choose where None. [T, M, k]"""
    stored_routes: StoredRoutes | None = None
    """Where the learner finds them, if they are recorded."""

    def __post_init__(self) -> None:
        if self.routes is not None and (
            self.routes.ndim != 3 or len(self.routes) != len(self.token_ids)
        ):
            raise InvalidFieldError(
                "routes", f"has shape {self.routes.shape}, token_ids {self.token_ids.shape}"
            )
        _same_length("loss_mask", self.token_ids, self.loss_mask)
        _same_length("sampler_logprobs", self.token_ids, self.sampler_logprobs)
        if self.is_current is not None:
            _same_length("is_current", self.token_ids, self.is_current)
        if self.loss_mask[0]:
            raise InvalidFieldError("loss_mask[0]", "the first token has no context to predict it")


class StoredRollout(NamedTuple):
    """A rollout of which the links are in the run's store."""

    rollout: int
    """Its place in the batch's rewards."""
    rollout_id: str
    content: bytes
    """A RolloutContent, serialised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBatch:
    """The groups that one optimiser step consumes."""

    sequences: tuple[PolicySequence, ...]
    """Links of all valid rollouts, in any order, without those that are in the store."""
    stored: tuple[StoredRollout, ...] = ()
    """Valid rollouts that learner ranks read themselves."""
    current: frozenset[VersionId] = frozenset()
    """Versions with exactly the weights of the step, to mark tokens of what is read."""
    rewards: NDArray[np.float64]
    """One per rollout; not read where invalid. [R]"""
    groups: NDArray[np.int64]
    """Group number of each rollout; siblings have the same. [R]"""
    valid: Bools
    """False for a rollout that a platform fault masked: it counts nowhere. [R]"""
    advantages: NDArray[np.float64] | None = None
    """Given ones, where others have compared the rewards; computed from the rewards of each group
    where None. [R]"""

    def __post_init__(self) -> None:
        given = self.rewards if self.advantages is None else self.advantages
        if not self.rewards.shape == self.groups.shape == self.valid.shape == given.shape:
            raise InvalidFieldError("rewards, groups, valid", "must have one entry per rollout")
        for name, values in (("rewards", self.rewards), ("advantages", given)):
            if not np.isfinite(values[self.valid]).all():
                raise InvalidFieldError(name, "must be finite where valid")
        self._check_places("sequences", [each.rollout for each in self.sequences])
        self._check_places("stored", [each.rollout for each in self.stored])

    def stored_keys(self) -> frozenset[str]:
        """Keys of the tokens of its stored rollouts."""
        parse = rollout_content_pb2.RolloutContent.FromString
        return frozenset(parse(each.content).tokens.key for each in self.stored)

    def _check_places(self, name: str, places: Sequence[int]) -> None:
        """Refuse rollouts without a reward.

        Raises:
            InvalidFieldError: naming the first one.
        """
        for index, place in enumerate(places):
            if not 0 <= place < len(self.rewards):
                outside = f"{place} is outside [0, {len(self.rewards)})"
                raise InvalidFieldError(f"{name}[{index}].rollout", outside)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of one optimiser step.

    Means and shares of policy steps estimate those over all sampled tokens of valid rollouts, also
    of rollouts that are filtered because their advantage is 0; only a sample of these is scored.
    """

    loss: float
    grad_norm: float
    """Before clipping."""
    tokens: int
    """Tokens of the rows that were trained, padding left out."""
    trained_tokens: int
    """Tokens with a part in the loss."""
    learning_rate: float
    entropy: float = 0.0
    """Nats per token; policy steps only, as are the three below."""
    mismatch_mean: float = 0.0
    """Mean of |trainer - sampler log-prob|, trainer before the update."""
    mismatch_max: float = 0.0
    mismatch_current: float | None = None
    """Mean of |trainer - sampler log-prob| over tokens that the trainer's very weights sampled;
    None if the batch has none."""
    current_tokens: int = 0
    """Number of these tokens."""
    clip_fraction: float = 0.0
    """Share of tokens whose importance ratio was clipped."""
    weight_digest: str
    """BLAKE3 of the fp32 weights after the step."""
    seconds: float
    mfu: float | None = None
    """Model FLOPs utilisation: share of the devices' peak; None on CPUs and unknown devices."""
    is_skipped: bool = False
    """True if the loss or gradient was not finite, and the batch was left out; other figures of the
    step are 0 then."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """Further figures of the algorithm, for metrics only."""
    data_cursor: str = ""
    """Position in streamed data after the step, as JSON; empty without any."""


def links_of(
    rollout: rollout_pb2.Rollout, *, index: int, current: Collection[VersionId] = ()
) -> tuple[PolicySequence, ...]:
    """Decode the links of a rollout as it came over the wire.

    Args:
        rollout: as it came, checked.
        index: its place in the batch's rewards.
        current: versions with exactly the weights of the step.
    """
    return tuple(
        PolicySequence(
            token_ids=np.asarray(link.token_ids, dtype=np.int32),
            loss_mask=np.frombuffer(link.loss_mask, dtype=np.uint8) != 0,
            sampler_logprobs=np.asarray(link.sampler_logprobs, dtype=np.float32),
            rollout=index,
            is_current=_current_tokens(link, current),
            stored_routes=_stored_routes(link),
        )
        for link in rollout.links
    )


def _stored_routes(link: rollout_pb2.Link) -> StoredRoutes | None:
    routes = link.routes
    return StoredRoutes(routes.key, routes.digest) if link.HasField("routes") else None


def _current_tokens(link: rollout_pb2.Link, current: Collection[VersionId]) -> Bools:
    """Select the tokens that current weights sampled over a context of current weights. [T]."""
    selected = np.zeros(len(link.token_ids), dtype=np.bool_)
    for span in link.spans:
        versions = VersionId.from_proto(span.sampled), VersionId.from_proto(span.context)
        if all(version in current for version in versions):
            selected[span.start : span.end] = True
    return selected


def check_sequences(
    sequences: Sequence[SupervisedSequence | PolicySequence], *, vocabulary: int, context: int
) -> None:
    """Refuse sequences that the model cannot process.

    Raises:
        InvalidFieldError: naming the first such sequence, and the token.
    """
    for index, sequence in enumerate(sequences):
        ids = sequence.token_ids
        if ids.size > context:
            raise InvalidFieldError(
                f"sequences[{index}].token_ids", f"{ids.size} tokens, the model takes {context}"
            )
        wrong = np.flatnonzero((ids < 0) | (ids >= vocabulary))
        if wrong.size:
            raise InvalidFieldError(
                f"sequences[{index}].token_ids[{wrong[0]}]",
                f"{ids[wrong[0]]} is outside the vocabulary of {vocabulary}",
            )


def check_routes(
    sequences: Sequence[SupervisedSequence | PolicySequence], shape: tuple[int, int] | None
) -> None:
    """Refuse recorded experts that are not of the model.

    Args:
        sequences: of a batch.
        shape: layers with experts and choices of a token; None if the model's routers cannot
            replay any.

    Raises:
        InvalidFieldError: naming the first such sequence.
    """
    for index, sequence in enumerate(sequences):
        routes = sequence.routes if isinstance(sequence, PolicySequence) else None
        if routes is None:
            continue
        name = f"sequences[{index}].routes"
        if shape is None:
            raise InvalidFieldError(name, "the model has no routers that can replay them")
        if routes.shape[1:] != shape:
            raise InvalidFieldError(name, f"has shape {routes.shape}, the model {shape} per token")


def _same_length(name: str, token_ids: Ints, other: NDArray[Any]) -> None:
    if token_ids.ndim != 1 or token_ids.size == 0:
        raise InvalidFieldError("token_ids", f"must be one row of tokens, got {token_ids.shape}")
    if other.shape != token_ids.shape:
        raise InvalidFieldError(name, f"has shape {other.shape}, token_ids {token_ids.shape}")

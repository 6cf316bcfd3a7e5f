"""Training phases in the learner: begin, save and restore."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from pydantic import JsonValue, ValidationError
from torch import Tensor, nn

from etude.common.api.meta import Model
from etude.common.api.run.async_limits import AsyncLimits
from etude.common.api.run.phases import MAX_RELEASE_LAG, Phase
from etude.common.api.run.roles import Lora
from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.common.blobs import Store
from etude.common.checkpoints.manifest import CheckpointObject
from etude.common.errors import (
    CorruptError,
    InvalidFieldError,
    Problem,
    StoreError,
    UserError,
    WrongStateError,
)
from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.algorithms.registry import build_algorithm
from etude.trainer.export.receipts import PeerFailedError
from etude.trainer.learner.checkpoint import index, reader
from etude.trainer.learner.checkpoint.shard_memory import ShardMemory
from etude.trainer.learner.checkpoint.writer import StateWriter
from etude.trainer.learner.guesses import check_head
from etude.trainer.learner.optimiser import Optimiser
from etude.trainer.learner.routes.balance import check_balance
from etude.trainer.learner.routes.replay import start_replay
from etude.trainer.model.fsdp import RankGroup, reshard_parameters
from etude.trainer.model.parameters import StepObserver, parameters_by_name
from etude.trainer.model.policy import Policy, copy_frozen
from etude.trainer.model.positions import set_positions

RNG = "rng"
"""Name of the state of torch's generator, which has the same value on every rank."""


class PhasePosition(NamedTuple):
    """Phase and step of a restored state."""

    phase: str
    step: int
    """Steps done of the phase."""


class _SavedPhase(Model):
    """The part of a checkpoint that is not tensors."""

    phase: Phase
    step: int
    updates: int
    has_reference: bool
    is_published: bool = False
    """True if these weights, or earlier ones of the same run, were published as a version."""
    lora: Lora | None = None
    """Settings of the adapters that are among the tensors."""
    has_biases: bool = False
    """True if the biases of routers are among the tensors, as since they can change."""


def read_lora(state: Mapping[str, JsonValue]) -> Lora | None:
    """Settings of the adapters of a saved state; None if it has none."""
    lora = state.get("lora")
    return None if lora is None else Lora.model_validate(lora)


@dataclass(slots=True)
class PhaseState:
    """A phase under way."""

    phase: Phase
    step: int
    """Steps done."""
    optimiser: Optimiser
    algorithm: AlgorithmSteps | None
    reference: nn.Module | None = None
    """The weights at the start of the phase, if there is a KL penalty."""


class RestoredPhase(NamedTuple):
    """A phase as a checkpoint had it."""

    state: PhaseState
    is_published: bool


class AdaptersChangedError(UserError):
    """The run has other adapters than the state that it is to go on from."""

    reason = "InvalidSpec"

    def __init__(self, saved: Lora | None, given: Lora | None) -> None:
        before, now = (
            "no adapters" if each is None else f"adapters with {each.to_json()}"
            for each in (saved, given)
        )
        super().__init__(
            Problem(
                reason=self.reason,
                what=f"the checkpoint has {before}, the run {now}",
                where="roles.trainer.lora",
                fix="restore the earlier value, or start a run from the checkpoint's model with"
                " spec.model.checkpointRef",
            )
        )


class _StagedState(NamedTuple):
    """A state that was read into memory, and the tensors that it goes to."""

    restored: RestoredPhase
    tensors: dict[str, Tensor]
    memory: ShardMemory


class PhaseManager:
    """Begins, saves and restores the phases of one policy.

    Every method but write_copy() is collective.
    """

    def __init__(
        self, policy: Policy, ranks: RankGroup, *, steps: StepObserver | None = None
    ) -> None:
        """Manage the phases of a policy."""
        self._policy = policy
        self._ranks = ranks
        self._steps = steps
        self._source = copy.deepcopy(policy.config)
        self._writer = StateWriter(ranks)

    def begin(self, parsed: Phase, step: int, *, under_way: PhaseState | None) -> PhaseState:
        """Begin a phase of which `step` steps are done, or update it if it is under way.

        Raises:
            ValueError: the phase is invalid, or the model does not allow its context extension,
                or has no head that it trains, or no routers that replay or balance experts.
            WrongStateError: it needs reference weights that were not kept.
        """
        algorithm = build_phase_algorithm(parsed)
        check_head(self._policy, parsed)
        check_balance(self._policy, parsed)
        start_replay(self._policy.routers, parsed)
        reshard_parameters(self._policy)
        self._set_positions(parsed, self._policy)
        if under_way is None or under_way.phase.name != parsed.name:
            state = PhaseState(parsed, step, self._optimiser(parsed), algorithm)
        else:
            under_way.optimiser.update_settings(parsed)
            kept = under_way.reference
            state = PhaseState(parsed, step, under_way.optimiser, algorithm, kept)
        if algorithm is None or algorithm.parameters.kl_coefficient == 0:
            state.reference = None
        elif state.reference is None and step > 0:
            raise WrongStateError(
                f"phase {parsed.name}: klCoefficient cannot be switched on after {step} steps,"
                " because the weights at the start of the phase were not kept"
            )
        elif state.reference is None:
            state.reference = copy_frozen(self._policy, self._ranks)
        elif isinstance(state.reference, Policy):  # adapters share the policy's own model
            self._set_positions(parsed, state.reference)
        return state

    def _set_positions(self, phase: Phase, policy: Policy) -> None:
        """Give a policy the positions of a phase.

        Raises:
            InvalidFieldError: the model does not allow its context extension.
        """
        try:
            set_positions(policy.model, self._source, phase.context_extension)
        except ValueError as cause:
            raise InvalidFieldError(f"phase {phase.name}: contextExtension", str(cause)) from cause

    def copy_state(self, prefix: str, state: PhaseState, *, is_published: bool) -> None:
        """Copy this rank's shards of the complete state to memory, to be written below prefix."""
        for module in (self._policy, state.reference):
            if module is not None:
                reshard_parameters(module)
        about = _SavedPhase(
            phase=state.phase,
            step=state.step,
            updates=state.optimiser.updates,
            has_reference=state.reference is not None,
            is_published=is_published,
            lora=self._policy.lora,
            has_biases=bool(self._policy.routers.biases),
        )
        self._writer.copy_state(prefix, self.live_tensors(state), about.model_dump(mode="json"))

    def live_tensors(self, state: PhaseState, *, has_biases: bool = True) -> dict[str, Tensor]:
        """All tensors that training changes, sharded as they are, and a copy of the generator's.

        Args:
            state: of the phase.
            has_biases: true with the biases of routers.
        """
        tensors: dict[str, Tensor] = {RNG: torch.get_rng_state()}
        for kind, policy in (("model", self._policy), ("reference", state.reference)):
            if policy is not None:
                named = parameters_by_name(policy)
                tensors |= {f"{kind}.{name}": p.detach() for name, p in named.items()}
            if has_biases and isinstance(policy, Policy):
                names = policy.routers.biases
                tensors |= {f"{kind}.{name}": policy.get_buffer(name) for name in names}
        return tensors | {f"adamw.{n}": t for n, t in state.optimiser.moments().items()}

    def write_copy(self, store: Store, prefix: str) -> list[CheckpointObject]:
        """Store the copied shards below prefix; it may run during a step.

        Raises:
            StoreError: the store failed; write again.
            WrongStateError: nothing was copied for prefix, or another state was copied meanwhile.
        """
        return self._writer.write_copy(store, prefix)

    def restore(self, store: Store, prefix: str) -> RestoredPhase:
        """Restore a saved state; nothing changes unless every rank can read its shards.

        Raises:
            CorruptError: an object is missing, damaged or of another model; it is named.
            PeerFailedError: another rank could not read its shards, and raises why.
            StoreError: the store failed.
        """
        error: CorruptError | StoreError | None = None
        staged: _StagedState | None = None
        try:
            staged = self._stage(store, prefix)
        except (CorruptError, StoreError) as caught:
            error = caught
        failed = int(self._ranks.total(torch.tensor(int(error is not None))))
        if error is not None:
            raise error
        if failed or staged is None:
            raise PeerFailedError(f"{failed} other ranks could not read their shards of {prefix}")
        staged.memory.copy_to(staged.tensors)
        torch.set_rng_state(staged.tensors[RNG])
        return staged.restored

    def _stage(self, store: Store, prefix: str) -> "_StagedState":
        """Read this rank's shards into memory.

        Raises:
            AdaptersChangedError: the policy has other adapters.
            CorruptError: an object is missing, damaged or of another model; it is named.
        """
        where = f"{store.url}/{prefix}"
        saved = index.read_indexes(store, prefix)
        try:
            about = _SavedPhase.model_validate(saved.state)
        except ValidationError as cause:
            raise CorruptError(f"{where}: {cause}") from cause
        if about.lora != self._policy.lora:
            raise AdaptersChangedError(about.lora, self._policy.lora)
        state = PhaseState(
            about.phase,
            about.step,
            self._optimiser(about.phase),
            build_phase_algorithm(about.phase),
            copy_frozen(self._policy, self._ranks) if about.has_reference else None,
        )
        state.optimiser.reset_moments(updates=about.updates)
        tensors = self.live_tensors(state, has_biases=about.has_biases)
        index.check_fit(saved, tensors, where=where)
        memory = ShardMemory.allocate(tensors)
        reader.read_shards(store, saved, memory, where=where)
        generator = next(shard for shard in memory.shards if shard.name == RNG)
        try:
            torch.Generator().set_state(memory.view(generator))
        except RuntimeError as cause:
            raise CorruptError(f"{where}: tensor {RNG!r} is no generator's: {cause}") from cause
        return _StagedState(RestoredPhase(state, about.is_published), tensors, memory)

    def _optimiser(self, phase: Phase) -> Optimiser:
        return Optimiser(self._policy, phase, steps=self._steps)


def build_phase_algorithm(phase: Phase) -> AlgorithmSteps | None:
    """Build the algorithm of a phase; None for a supervised one.

    Raises:
        ValueError: a parameter is unknown, ignored or out of range.
    """
    if phase.algorithm is None:
        return None
    if phase.feedback is not None:
        # The steps of a window go away from the version that served it.
        return build_algorithm(
            phase.algorithm, max_tokens=phase.feedback.max_tokens, max_staleness=MAX_RELEASE_LAG
        )
    rollout = phase.rollout or RolloutPolicy()
    limits = phase.async_limits or AsyncLimits()
    return build_algorithm(
        phase.algorithm,
        max_tokens=rollout.max_trained_tokens,
        max_staleness=limits.max_staleness_versions,
    )

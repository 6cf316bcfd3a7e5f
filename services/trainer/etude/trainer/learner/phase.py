"""Training phases in the learner: begin, save and restore."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from pydantic import JsonValue, ValidationError
from torch import Tensor, nn

from etude.common.api.meta import Model
from etude.common.api.run.lora import Lora
from etude.common.api.run.phases import AsyncLimits, Phase, RolloutPolicy
from etude.common.blobs import ObjectInfo, Store
from etude.common.errors import (
    CorruptError,
    InvalidFieldError,
    Problem,
    UserError,
    WrongStateError,
)
from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.algorithms.registry import build_algorithm
from etude.trainer.export import hf_folder
from etude.trainer.learner import checkpoint
from etude.trainer.learner.optimiser import Optimiser
from etude.trainer.model.fsdp import RankGroup, reshard_parameters
from etude.trainer.model.parameters import StepObserver, fill_shard, gather_full, parameters_by_name
from etude.trainer.model.policy import Policy, copy_frozen
from etude.trainer.model.positions import set_positions


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


class PhaseManager:
    """Begins, saves and restores the phases of one policy; every method is collective."""

    def __init__(
        self, policy: Policy, ranks: RankGroup, *, steps: StepObserver | None = None
    ) -> None:
        """Manage the phases of a policy."""
        self._policy = policy
        self._ranks = ranks
        self._steps = steps
        self._source = copy.deepcopy(policy.config)

    def begin(self, parsed: Phase, step: int, *, under_way: PhaseState | None) -> PhaseState:
        """Begin a phase of which `step` steps are done, or update it if it is under way.

        Raises:
            ValueError: the phase is invalid, or the model does not allow its context extension.
            WrongStateError: it needs reference weights that were not kept.
        """
        algorithm = _algorithm(parsed)
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

    def save(
        self, store: Store, prefix: str, state: PhaseState, *, is_published: bool
    ) -> list[ObjectInfo]:
        """Write the complete state below prefix; rank 0 lists the objects.

        Raises:
            StoreError: the store failed.
        """
        for module in (self._policy, state.reference):
            if module is not None:
                reshard_parameters(module)
        live = {**self._live_tensors(state), "rng": torch.get_rng_state()}
        # Gather everything first: a store that fails midway must not leave other ranks waiting.
        named: dict[str, Tensor] = {}
        for name, tensor in live.items():
            complete = gather_full(tensor)
            if self._ranks.is_first:
                named[name] = complete.cpu()
        if not self._ranks.is_first:
            return []
        about = _SavedPhase(
            phase=state.phase,
            step=state.step,
            updates=state.optimiser.updates,
            has_reference=state.reference is not None,
            is_published=is_published,
            lora=self._policy.lora,
        )
        return checkpoint.write_state(
            store,
            prefix,
            tensors=(hf_folder.to_wire_tensor(name, tensor) for name, tensor in named.items()),
            state=about.model_dump(mode="json"),
        )

    def restore(self, store: Store, prefix: str) -> RestoredPhase:
        """Restore a saved state; nothing changes unless all of it is valid.

        Raises:
            AdaptersChangedError: the policy has other adapters.
            CorruptError: an object is missing, damaged or of another model; it is named.
        """
        where = f"{store.url}/{prefix}"
        saved = checkpoint.read_state(store, prefix)
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
            _algorithm(about.phase),
            copy_frozen(self._policy, self._ranks) if about.has_reference else None,
        )
        state.optimiser.reset_moments(updates=about.updates)
        live = self._live_tensors(state)
        rng = saved.tensors.pop("rng", torch.zeros(0))
        checkpoint.check_fit(saved.tensors, live, where=where)
        torch.set_rng_state(rng)
        for name, tensor in live.items():
            fill_shard(tensor, saved.tensors[name])
        return RestoredPhase(state, about.is_published)

    def _optimiser(self, phase: Phase) -> Optimiser:
        return Optimiser(self._policy, phase, steps=self._steps)

    def _live_tensors(self, state: PhaseState) -> dict[str, Tensor]:
        """All tensors that training changes, sharded as they are."""
        tensors: dict[str, Tensor] = {}
        for kind, policy in (("model", self._policy), ("reference", state.reference)):
            if policy is not None:
                named = parameters_by_name(policy)
                tensors |= {f"{kind}.{name}": p.detach() for name, p in named.items()}
        return tensors | {f"adamw.{n}": t for n, t in state.optimiser.moments().items()}


def _algorithm(phase: Phase) -> AlgorithmSteps | None:
    if phase.algorithm is None:
        return None
    rollout = phase.rollout or RolloutPolicy()
    limits = phase.async_limits or AsyncLimits()
    return build_algorithm(
        phase.algorithm,
        max_tokens=rollout.max_trained_tokens,
        max_staleness=limits.max_staleness_versions,
    )

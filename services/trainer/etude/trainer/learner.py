"""One learner rank: the weights, their optimiser, and the steps that change them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from blake3 import blake3
from pydantic import JsonValue, ValidationError
from torch import Tensor

from etude.common import weights
from etude.common.api.meta import Model
from etude.common.api.phases import Phase, RolloutPolicy
from etude.common.blobs import ObjectInfo, open_store
from etude.common.errors import CorruptError, WrongStateError
from etude.common.weights import VersionId
from etude.trainer import learner_state, publisher, ranks, rows
from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.algorithms.choice import chosen
from etude.trainer.batches import (
    PolicyBatch,
    PolicySequence,
    StepResult,
    SupervisedSequence,
    check_sequences,
)
from etude.trainer.gradients import accumulate
from etude.trainer.learner_config import LearnerConfig
from etude.trainer.microbatches import Microbatch
from etude.trainer.objective import Objective, PolicyObjective, Reference, imitation
from etude.trainer.optimiser import Optimiser, Update
from etude.trainer.policy import Policy, like, load_policy
from etude.trainer.rows import Row


class Position(NamedTuple):
    """Where in the run a restored state is."""

    phase: str
    step: int
    """Steps done of the phase."""


class _Saved(Model):
    """What a checkpoint holds beside tensors."""

    phase: Phase
    step: int
    updates: int
    has_reference: bool


@dataclass(slots=True)
class _PhaseState:
    """A phase under way."""

    phase: Phase
    step: int
    """Steps done."""
    optimiser: Optimiser
    algorithm: AlgorithmSteps | None
    reference: Policy | None = None
    """The weights at the start of the phase, if the divergence from them costs something."""


class Learner:
    """Trains one copy, or one rank's shard, of the policy; a plain class that Ray may wrap.

    Every method is collective: with more than one rank, call it on all of them alike.
    """

    def __init__(self, config: LearnerConfig) -> None:
        torch.set_num_threads(config.threads)
        self._config = config
        self._store = open_store(
            config.storage.uri, endpoint=config.storage.endpoint, region=config.storage.region
        )
        self._ranks = ranks.join(
            rank=config.rank, size=config.world_size, rendezvous=config.rendezvous
        )
        self.policy = load_policy(config.model_folder, seed=config.seed)
        self._ranks.shard(self.policy)
        self._state: _PhaseState | None = None

    def close(self) -> None:
        """Leave the other ranks."""
        ranks.leave(self._ranks)

    def start_phase(self, phase: Mapping[str, object], step: int) -> None:
        """Take the settings of a phase (JSON of api.phases.Phase), `step` steps of it being done.

        The optimiser starts afresh and the present weights become the reference, unless this very
        phase is under way or was restored: then only its settings are renewed.

        Raises:
            ValueError: the phase is invalid.
            WrongStateError: it asks for a divergence from weights that are gone.
        """
        parsed = Phase.model_validate(phase)
        algorithm = _algorithm(parsed)
        state = self._state
        if state is None or state.phase.name != parsed.name:
            state = _PhaseState(parsed, step, Optimiser(self.policy, parsed), algorithm)
        else:
            state.optimiser.renew(parsed)
            state = _PhaseState(parsed, step, state.optimiser, algorithm, state.reference)
        if algorithm is None or algorithm.parameters.kl_coefficient == 0:
            state.reference = None
        elif state.reference is None and step > 0:
            raise WrongStateError(
                f"phase {parsed.name}: klCoefficient cannot be switched on after {step} steps,"
                " because the weights at the start of the phase were not kept"
            )
        elif state.reference is None:
            state.reference = self._copy()
        self._state = state

    def supervised_step(self, sequences: Sequence[SupervisedSequence]) -> StepResult:
        """One update towards the given tokens.

        Raises:
            InvalidFieldError: a token that the model does not know, or a sequence too long.
            NonFiniteLossError: nothing was changed.
            WrongStateError: no phase was started.
        """
        started = time.perf_counter()
        self._check(sequences)
        trained = rows.supervised_rows(sequences)
        loss, update = self._update(trained, imitation)
        return StepResult(
            loss=loss,
            grad_norm=update.grad_norm,
            tokens=sum(row.token_ids.size for row in trained),
            trained_tokens=sum(row.places.size for row in trained),
            learning_rate=update.learning_rate,
            weight_digest=self.digest(),
            seconds=time.perf_counter() - started,
        )

    def policy_step(self, batch: PolicyBatch) -> StepResult:
        """One update from the rewards of whole groups.

        Raises:
            InvalidFieldError: a token that the model does not know, or a sequence too long.
            NonFiniteLossError: nothing was changed.
            WrongStateError: the phase that was started has no algorithm.
        """
        started = time.perf_counter()
        self._check(batch.sequences)
        state = self._under_way()
        if state.algorithm is None:
            raise WrongStateError(f"phase {state.phase.name} has no algorithm")
        trained = rows.policy_rows(batch, state.algorithm)
        reference = None if state.reference is None else _scorer(state.reference)
        objective = PolicyObjective(algorithm=state.algorithm, reference=reference)
        loss, update = self._update(trained.rows, objective)
        figures = objective.summary(self._ranks)
        return StepResult(
            loss=loss,
            grad_norm=update.grad_norm,
            tokens=sum(row.token_ids.size for row in trained.rows),
            trained_tokens=sum(row.places.size for row in trained.rows),
            learning_rate=update.learning_rate,
            entropy=figures.pop("entropy"),
            mismatch_mean=figures.pop("mismatch"),
            mismatch_max=figures.pop("mismatch_max"),
            clip_fraction=figures.pop("clipped"),
            weight_digest=self.digest(),
            seconds=time.perf_counter() - started,
            extra=figures
            | {"removed_tokens": trained.removed, "filtered_rollouts": trained.filtered},
        )

    def _update(self, trained: Sequence[Row], objective: Objective) -> tuple[float, Update]:
        """Follow the gradient of the rows; without any, only the schedule moves on."""
        state = self._under_way()
        if trained:
            loss = accumulate(
                self.policy,
                trained,
                objective,
                ranks=self._ranks,
                max_tokens=self._config.micro_batch_tokens,
            )
            update = state.optimiser.apply(step=state.step, loss=loss)
        else:
            loss, update = 0.0, Update(0.0, state.optimiser.rate(state.step))
        state.step += 1
        return loss, update

    def publish(self, version: VersionId, step: int) -> dict[str, JsonValue] | None:
        """Make the present weights visible under version; the manifest as JSON, on rank 0.

        Raises:
            FencedError: a newer publisher took over.
            StoreError: the store failed; publish again.
        """
        tensors = self._published()
        if not self._ranks.is_first:
            return None
        manifest = weights.publish(
            self._store,
            run=self._config.run,
            version=version,
            step=step,
            holder=self._config.holder,
            tensors=tensors,
        )
        return manifest.model_dump(mode="json")

    def export(self, prefix: str) -> list[ObjectInfo]:
        """Write the weights below prefix as a Hugging Face folder; what was written, on rank 0.

        Raises:
            StoreError: the store failed.
        """
        tensors = self._published()
        if not self._ranks.is_first:
            return []
        return publisher.export(
            self._store,
            prefix,
            policy=self.policy,
            tensors=tensors,
            source=self._config.model_folder,
        )

    def save(self, prefix: str) -> list[ObjectInfo]:
        """Write the complete state below prefix; what was written, on rank 0.

        Raises:
            StoreError: the store failed.
            WrongStateError: no phase was started.
        """
        state = self._under_way()
        live = {**self._live_tensors(state), "rng": torch.get_rng_state()}
        # All ranks hand over everything first: a store that fails midway must not strand them.
        named: dict[str, Tensor] = {}
        for name, tensor in live.items():
            whole = ranks.whole(tensor)
            if self._ranks.is_first:
                named[name] = whole.cpu()
        if not self._ranks.is_first:
            return []
        about = _Saved(
            phase=state.phase,
            step=state.step,
            updates=state.optimiser.updates,
            has_reference=state.reference is not None,
        )
        return learner_state.write(
            self._store,
            prefix,
            tensors=(publisher.wire_tensor(name, tensor) for name, tensor in named.items()),
            state=about.model_dump(mode="json"),
        )

    def restore(self, prefix: str) -> Position:
        """Return to a saved state; nothing changes unless all of it is good.

        Raises:
            CorruptError: an object is missing, damaged or of another model; it is named.
        """
        where = f"{self._store.url}/{prefix}"
        saved = learner_state.read(self._store, prefix)
        try:
            about = _Saved.model_validate(saved.state)
        except ValidationError as cause:
            raise CorruptError(f"{where}: {cause}") from cause
        state = _PhaseState(
            about.phase,
            about.step,
            Optimiser(self.policy, about.phase),
            _algorithm(about.phase),
            self._copy() if about.has_reference else None,
        )
        state.optimiser.prepare(updates=about.updates)
        live = self._live_tensors(state)
        rng = saved.tensors.pop("rng", torch.zeros(0))
        learner_state.check_fit(saved.tensors, live, where=where)
        torch.set_rng_state(rng)
        for name, tensor in live.items():
            ranks.fill(tensor, saved.tensors[name])
        self._state = state
        return Position(about.phase.name, about.step)

    def digest(self) -> str:
        """BLAKE3 of the fp32 weights, in the order of their names; collective."""
        hasher = blake3()
        for name, parameter in ranks.parameters_by_name(self.policy).items():
            hasher.update(name.encode())
            hasher.update(publisher.wire_tensor(name, ranks.whole(parameter)).data)
        return hasher.hexdigest()

    def _live_tensors(self, state: _PhaseState) -> dict[str, Tensor]:
        """Everything that training changes, sharded as it is."""
        tensors: dict[str, Tensor] = {}
        for kind, policy in (("model", self.policy), ("reference", state.reference)):
            if policy is not None:
                named = ranks.parameters_by_name(policy)
                tensors |= {f"{kind}.{name}": p.detach() for name, p in named.items()}
        return tensors | {f"adamw.{n}": t for n, t in state.optimiser.moments().items()}

    def _copy(self) -> Policy:
        """A frozen copy of the present weights, sharded alike."""
        copy = like(self.policy)
        self._ranks.shard(copy)
        own = ranks.parameters_by_name(self.policy)
        for name, parameter in ranks.parameters_by_name(copy).items():
            parameter.data.copy_(own[name].data)
        return copy.requires_grad_(requires_grad=False)

    def _published(self) -> list[weights.Tensor]:
        return publisher.published_tensors(
            self.policy, self._ranks, dtype=self._config.weights_dtype
        )

    def _under_way(self) -> _PhaseState:
        if self._state is None:
            raise WrongStateError("no phase was started")
        return self._state

    def _check(self, sequences: Sequence[SupervisedSequence | PolicySequence]) -> None:
        config = self.policy.config
        check_sequences(
            sequences, vocabulary=config.vocab_size, context=config.max_position_embeddings
        )


def _algorithm(phase: Phase) -> AlgorithmSteps | None:
    if phase.algorithm is None:
        return None
    rollout = phase.rollout or RolloutPolicy()
    return chosen(phase.algorithm, max_tokens=rollout.max_tokens)


def _scorer(reference: Policy) -> Reference:
    def logprobs(microbatch: Microbatch) -> Tensor:
        with torch.no_grad():
            scores = reference(microbatch.token_ids, microbatch.rows, microbatch.places)
        known: Tensor = scores.logprobs
        return known

    return logprobs

"""The learner of one rank: weights, training steps, gradient accumulation, export, restore."""

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from etude.common.api.run.phases import Phase
from etude.common.blobs import ObjectInfo, open_store
from etude.common.checkpoints.manifest import CheckpointObject
from etude.common.errors import WrongStateError
from etude.common.weights import VersionId
from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.export import hf_folder, peft_folder
from etude.trainer.export.publisher import Publisher
from etude.trainer.export.receipts import NonFiniteWeightsError, PublishBase, RankReceipt
from etude.trainer.learner import rows
from etude.trainer.learner.batches import (
    PolicyBatch,
    PolicySequence,
    StepResult,
    SupervisedSequence,
    check_routes,
    check_sequences,
)
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.divergence import Losses, measure_divergence
from etude.trainer.learner.gradients import (
    accumulate_gradients,
    microbatch_losses,
    reference_scorer,
)
from etude.trainer.learner.guesses import add_guesses
from etude.trainer.learner.objective import Objective, PolicyObjective, imitation_loss
from etude.trainer.learner.optimiser import Update
from etude.trainer.learner.phase import PhaseManager, PhasePosition, PhaseState
from etude.trainer.learner.proximal import RowScorer
from etude.trainer.learner.routes.balance import balance_update
from etude.trainer.learner.routes.load import ExpertLoad
from etude.trainer.learner.rows import TrainingRow
from etude.trainer.learner.sequence_packing import build_packing
from etude.trainer.learner.step_figures import (
    build_policy_result,
    combine_updates,
    complete_result,
    score_filtered,
)
from etude.trainer.model import activation_checkpointing, fsdp, tensor_bits
from etude.trainer.model.mesh import MeshShape
from etude.trainer.model.parameters import local_shard
from etude.trainer.model.policy import load_policy
from etude.trainer.model.weight_digest import weight_digest


class Learner:
    """Trains one copy, or one rank's shard, of the policy; a plain class that Ray may wrap.

    Every method but upload() and save() is collective: call it on all ranks alike.
    """

    def __init__(self, config: LearnerConfig) -> None:
        torch.set_num_threads(config.threads)
        self._config = config
        self._store = open_store(
            config.storage.uri, endpoint=config.storage.endpoint, region=config.storage.region
        )
        self._ranks = fsdp.join_ranks(
            rank=config.rank,
            size=config.world_size,
            rendezvous=config.rendezvous,
            shape=MeshShape(config.replicas, config.context, config.expert),
            offload=config.cpu_offload,
        )
        self.policy = load_policy(
            config.model_folder,
            seed=config.seed,
            ranks=self._ranks,
            weights=config.open_weights(),
            lora=config.lora,
        )
        self._packing = build_packing(config, self.policy.model, device=self._ranks.device)
        mode = activation_checkpointing.Checkpointing(config.activation_checkpointing)
        activation_checkpointing.checkpoint_blocks(self.policy.model, mode)
        if config.compile_blocks:
            activation_checkpointing.compile_blocks(self.policy.model)
        self._publisher = Publisher(
            self.policy, self._ranks, store=self._store, settings=config.weights
        )
        self._phases = PhaseManager(self.policy, self._ranks, steps=self._publisher)
        self._state: PhaseState | None = None

    def close(self) -> None:
        """Leave the other ranks."""
        fsdp.leave_ranks(self._ranks)

    def start_phase(self, phase: Mapping[str, object], step: int) -> None:
        """Start or update a phase (JSON of api.phases.Phase) of which `step` steps are done.

        The optimiser starts afresh and the current weights become the reference, unless this very
        phase is under way or was restored: then only its settings change.

        Raises:
            ValueError: the phase is invalid.
            WrongStateError: it needs reference weights that were not kept.
        """
        parsed = Phase.model_validate(phase)
        self._state = self._phases.begin(parsed, step, under_way=self._state)

    def supervised_step(self, sequences: Sequence[SupervisedSequence]) -> StepResult:
        """One update towards the given tokens.

        Raises:
            InvalidFieldError: a token that the model does not know, or a sequence too long.
            NonFiniteLossError: nothing was changed.
            WrongStateError: no phase was started.
        """
        started = time.perf_counter()
        self._check_batch(sequences)
        trained = rows.supervised_rows(sequences)
        loss, update = self._update(trained, imitation_loss)
        result = StepResult(
            loss=loss,
            grad_norm=update.grad_norm,
            tokens=sum(row.token_ids.size for row in trained),
            trained_tokens=sum(row.places.size for row in trained),
            learning_rate=update.learning_rate,
            weight_digest=self.digest(),
            seconds=time.perf_counter() - started,
        )
        return self._complete(result, update, trained)

    def held_out_loss(self, sequences: Sequence[SupervisedSequence]) -> float:
        """Mean loss of a trained token, in nats; trains nothing.

        Raises:
            InvalidFieldError: a token that the model does not know, or a sequence too long.
        """
        self._check_batch(sequences)
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for loss in microbatch_losses(
                self.policy,
                rows.supervised_rows(sequences),
                imitation_loss,
                ranks=self._ranks,
                packing=self._packing,
            ):
                total += loss.cpu()
        fsdp.reshard_parameters(self.policy)
        return float(self._ranks.total(total))

    def policy_step(self, batch: PolicyBatch) -> StepResult:
        """Updates from the rewards of whole groups: one, or as many as the algorithm asks for.

        Raises:
            InvalidFieldError: a token that the model does not know, or a sequence too long.
            RefusedUpdateError: an update was not applied, nor any after it.
            WrongStateError: the phase that was started has no algorithm.
        """
        started = time.perf_counter()
        self._check_batch(batch.sequences)
        state = self._current_phase()
        algorithm = self._algorithm_of(state)
        trained = rows.policy_rows(batch, algorithm)
        reference = None if state.reference is None else reference_scorer(state.reference)
        is_in_reward = algorithm.parameters.kl_credit == "Sequence"
        objective = PolicyObjective(
            algorithm=algorithm, reference=None if is_in_reward else reference
        )
        scorer = RowScorer(
            policy=self.policy, algorithm=algorithm, losses=self._losses, ranks=self._ranks
        )
        # Before the updates: the figures are of the weights that they start from.
        sampled = score_filtered(trained.filtered_rows, objective, scorer=scorer, seed=state.step)
        counts: dict[str, float] = {
            "removed_tokens": trained.removed,
            "filtered_rollouts": trained.filtered,
            "filtered_tokens_scored": sampled,
        }
        if is_in_reward and reference is not None and trained.rows:
            penalised, counts["reference_kl"] = scorer.penalise(trained.rows, batch, reference)
            trained = trained._replace(rows=penalised)
        loss, update, passed = self._update_from(trained.rows, objective, scorer)
        result = build_policy_result(
            loss,
            update,
            objective.summary(self._ranks, trained_tokens=passed) | counts,
            trained=trained.rows,
            weight_digest=self.digest(),
            seconds=time.perf_counter() - started,
        )
        return self._complete(result, update, trained.rows)

    def _update_from(
        self, trained: Sequence[TrainingRow], objective: PolicyObjective, scorer: RowScorer
    ) -> tuple[float, Update, int]:
        """Apply updates, each of its own rows, until one is left out; count their tokens too."""
        scored = scorer.add_proximal(trained)
        made, passed = [], 0
        for number in range(objective.algorithm.parameters.updates_per_batch):
            own = [row for row in scored if row.update == number]
            if own or not scored:
                made.append(self._apply(scorer.add_current(own, update=number), objective))
                passed += sum(row.places.size for row in own)
                if made[-1][1].is_skipped:  # one bad batch must not count as several
                    break
        self._current_phase().step += 1
        losses, updates = zip(*made, strict=True)
        return sum(losses) / len(made), combine_updates(updates), passed

    def measure_divergence(self, batch: PolicyBatch) -> float:
        """Mean KL(policy || sampler) of a sampled token of the batch, in nats; trains nothing.

        Raises:
            InvalidFieldError: a token that the model does not know, or a sequence too long.
            WrongStateError: the phase that was started has no algorithm.
        """
        self._check_batch(batch.sequences)
        state = self._current_phase()
        trained = rows.policy_rows(batch, self._algorithm_of(state))
        return measure_divergence(
            self.policy,
            [*trained.rows, *trained.filtered_rows],
            losses=self._losses,
            ranks=self._ranks,
            seed=state.step,
        )

    @property
    def _losses(self) -> Losses:
        return partial(microbatch_losses, self.policy, ranks=self._ranks, packing=self._packing)

    def _algorithm_of(self, state: PhaseState) -> AlgorithmSteps:
        """Algorithm of the phase.

        Raises:
            WrongStateError: it has none.
        """
        if state.algorithm is None:
            raise WrongStateError(f"phase {state.phase.name} has no algorithm")
        return state.algorithm

    def _complete(
        self, result: StepResult, update: Update, trained: Sequence[TrainingRow]
    ) -> StepResult:
        cost, ranks = self._packing.cost, self._ranks
        return complete_result(
            result, update, trained, cost=cost, devices=ranks.size, device=ranks.device
        )

    def _update(self, trained: Sequence[TrainingRow], objective: Objective) -> tuple[float, Update]:
        """Make the one update of a step."""
        made = self._apply(trained, objective)
        self._current_phase().step += 1
        return made

    def _apply(self, trained: Sequence[TrainingRow], objective: Objective) -> tuple[float, Update]:
        """Apply the gradient of the rows; without rows, nothing changes."""
        state = self._current_phase()
        if not trained:
            return 0.0, Update(0.0, state.optimiser.rate_at(state.step))
        guesses = add_guesses(objective, state.phase, trained)
        load = ExpertLoad(self.policy, self._ranks)
        with load.counting(guesses or objective) as counted:
            loss = accumulate_gradients(
                self.policy,
                trained,
                counted,
                ranks=self._ranks,
                packing=self._packing,
                guesses=guesses is not None,
            )
        figures = load.summary() | ({} if guesses is None else guesses.summary(self._ranks))
        if isinstance(objective, PolicyObjective):
            figures |= objective.judge_update(self._ranks)
        if figures.get("limited_fraction") and math.isfinite(loss):
            return loss, Update(0.0, state.optimiser.rate_at(state.step), figures=figures)
        update = state.optimiser.apply(step=state.step, loss=loss)
        balance_update(self.policy, state.phase, load, update, steps=self._publisher)
        return loss, update._replace(figures=figures)

    def encode(self, version: VersionId, base: PublishBase | None) -> RankReceipt:
        """Encode this rank's part of the current weights for upload.

        Raises:
            NonFiniteWeightsError: some are NaN or infinite; nothing was encoded.
            SchemaChangedError: the base is of another model; nothing was encoded.
            StoreError: the store failed; encode again.
        """
        return self._publisher.encode(version, base)

    def upload(self, version: VersionId) -> None:
        """Store this rank's part of an encoded version; not collective, may run during a step.

        Raises:
            StoreError: the store failed; upload again.
        """
        self._publisher.upload(version)

    def export(self, prefix: str) -> list[ObjectInfo]:
        """Write the weights below prefix as a Hugging Face folder; rank 0 lists the objects.

        Raises:
            StoreError: the store failed.
        """
        return hf_folder.write_hf_folder(
            self._store,
            prefix,
            policy=self.policy,
            ranks=self._ranks,
            dtype=self._config.weights.dtype,
            source=self._config.model_folder,
        )

    def export_adapter(self, prefix: str) -> list[ObjectInfo]:
        """Write the adapters, if there are any, below prefix for PEFT; rank 0 lists the objects.

        Raises:
            StoreError: the store failed.
        """
        base_uri = self._config.base_uri
        return peft_folder.write_peft_folder(
            self._store, prefix, policy=self.policy, ranks=self._ranks, base_uri=base_uri
        )

    def copy_state(self, prefix: str) -> None:
        """Copy this rank's part of the complete state to memory, for save() with this prefix.

        Raises:
            NonFiniteWeightsError: some weights are NaN or infinite; nothing was copied.
            WrongStateError: no phase was started.
        """
        self._check_finite()
        state = self._current_phase()
        self._phases.copy_state(prefix, state, is_published=self._publisher.is_following)

    def save(self, prefix: str) -> list[CheckpointObject]:
        """Store this rank's copied part below prefix; not collective, may run during a step.

        Raises:
            StoreError: the store failed; save again.
            WrongStateError: nothing was copied for prefix, or another state was copied meanwhile.
        """
        return self._phases.write_copy(self._store, prefix)

    def restore(self, prefix: str) -> PhasePosition:
        """Restore a saved state; nothing changes unless every rank can read its shards.

        Raises:
            CorruptError: an object is missing, damaged or of another model; it is named.
            PeerFailedError: another rank could not read its shards, and raises why.
            StoreError: the store failed.
        """
        restored = self._phases.restore(self._store, prefix)
        self._state = restored.state
        if restored.is_published:
            self._publisher.follow_changes()
        else:
            self._publisher.forget_base()
        return PhasePosition(restored.state.phase.name, restored.state.step)

    @property
    def steps_done(self) -> int:
        """Steps of the phase under way."""
        return self._current_phase().step

    def digest(self) -> str:
        """State digest of the master weights; collective, and reads only this rank's shards."""
        return weight_digest(self.policy, self._ranks)

    def _check_finite(self) -> None:
        """Refuse weights that no run could resume from, judged in the published dtype.

        Raises:
            NonFiniteWeightsError: some are NaN or infinite.
        """
        settings = self._config.weights
        shards = [local_shard(each.detach()) for each in self.policy.parameters()]
        own = sum(tensor_bits.count_nonfinite(each, dtype=settings.dtype) for each in shards)
        found = int(self._ranks.total(torch.tensor(own)))
        if found and not settings.advanced.allow_non_finite:
            raise NonFiniteWeightsError(
                f"no checkpoint was written: {found} weights are NaN or infinite"
            )

    def _current_phase(self) -> PhaseState:
        if self._state is None:
            raise WrongStateError("no phase was started")
        return self._state

    def _check_batch(self, sequences: Sequence[SupervisedSequence | PolicySequence]) -> None:
        config = self.policy.config
        check_sequences(
            sequences, vocabulary=config.vocab_size, context=config.max_position_embeddings
        )
        check_routes(sequences, self.policy.routers.shape)

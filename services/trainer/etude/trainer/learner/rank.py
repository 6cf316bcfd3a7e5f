"""Actor of one learner rank: the learner with the dataset that it trains on."""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from socket import gethostname
from typing import TYPE_CHECKING

from etude.agent.chat import DataFormat
from etude.common.api.run.phases import Phase
from etude.common.blobs import MissingError, ObjectInfo, Store
from etude.common.checkpoints import manifest
from etude.common.checkpoints.manifest import CheckpointObject
from etude.common.errors import EtudeError, Problem, StoreError, UserError, WrongStateError
from etude.common.store_urls import folder_of
from etude.common.stores import find_model_folder, open_run_store
from etude.common.weights import VersionId
from etude.common.weights.protocol.epochs import epochs_of
from etude.trainer.export.receipts import PublishBase, RankReceipt
from etude.trainer.learner.batch_reader import BatchReader, TokenLimits
from etude.trainer.learner.batches import PolicyBatch, StepResult, SupervisedSequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.content_spool import ContentSpool
from etude.trainer.learner.data.phase_data import DataReader
from etude.trainer.learner.data.rank_exchange import (
    DataListing,
    ProcessGroupExchange,
    check_same_data,
    digest_blocks,
    digest_sequences,
)
from etude.trainer.learner.data.stream import TokenStream
from etude.trainer.learner.data.windows import RankExchange
from etude.trainer.learner.dataset import SupervisedDataset, load_dataset
from etude.trainer.learner.routes.replay import RouteLoader, replay_mode
from etude.v1 import rollout_content_pb2

if TYPE_CHECKING:
    from etude.trainer.learner.learner import Learner
    from etude.trainer.model.fsdp import Rendezvous

LEARNER = "learner"


class LearnerRank:
    """One learner rank. Calls are collective, as the learner's are.

    open_rendezvous() and load() come first.
    """

    _rendezvous: "Rendezvous"
    """Kept as long as the process: its ranks talk over it."""
    _learner: "Learner"
    _store: Store
    _spool: ContentSpool
    """Of the phase."""
    _phase: Phase

    def __init__(self, config: LearnerConfig) -> None:
        self._config = config
        self._data: SupervisedDataset | TokenStream | None = None
        self._held_out: Mapping[str, list[SupervisedSequence]] = {}

    def open_rendezvous(self, host: str) -> str:
        """Import torch, and on rank 0 of several open the address at which they meet.

        Args:
            host: address of the node of rank 0, IPv4 or IPv6.

        Returns:
            The address, for load(); empty on other ranks.
        """
        # The controller names this class, and must not load torch for it.
        from etude.trainer.learner import learner  # noqa: F401, PLC0415 - torch is heavy
        from etude.trainer.model import fsdp  # noqa: PLC0415

        if self._config.rank or self._config.world_size == 1:
            return ""
        self._rendezvous = fsdp.open_rendezvous(host)
        return self._rendezvous.url

    def load(self, rendezvous: str = "") -> None:
        """Load the model; Ray would report an error of the constructor as a dead actor.

        Args:
            rendezvous: of several ranks.
        """
        from etude.trainer.learner.learner import Learner  # noqa: PLC0415 - torch is heavy

        config = self._config
        folder = find_model_folder(config.model_folder, config.model_uri, config.storage)
        self._config = replace(config, model_folder=folder, rendezvous=rendezvous)
        self._store = open_run_store(config.storage.uri, config.storage)
        self._learner = Learner(self._config)

    def start_phase(
        self, phase_json: Mapping[str, object], step: int, data_cursor: str = ""
    ) -> None:
        """Start or update a phase, and open its data if it has any."""
        phase = Phase.model_validate(phase_json)
        self._phase, self._data, self._held_out = phase, None, {}
        self._spool = ContentSpool(self._store)
        # First, because the phase may extend the model's context, which bounds the data.
        self._learner.start_phase(phase_json, step)
        if phase.data is not None:
            self._open_data(phase, data_cursor)

    def _open_data(self, phase: Phase, data_cursor: str) -> None:
        ranks = ProcessGroupExchange(self._config.rank, self._config.world_size)
        try:
            self._read_data(phase, data_cursor, ranks)
            listing = DataListing(self._digest_data())
        except EtudeError as error:
            # Raised on all ranks: one that raised alone would leave the others in a collective.
            listing = DataListing({}, error)
        check_same_data(listing, ranks)

    def _read_data(self, phase: Phase, data_cursor: str, ranks: RankExchange) -> None:
        config = self._config
        chat = DataFormat(config.model_folder)
        context = self._learner.policy.config.max_position_embeddings
        reader = DataReader(chat=chat, context=context, storage=config.storage)
        if phase.batch_tokens is None:
            self._data = load_dataset(phase, chat=chat, context=context, storage=config.storage)
        else:
            self._data = reader.open_stream(phase, ranks=ranks, cursor=data_cursor)
        if phase.validation is not None:
            self._held_out = reader.load_held_out(phase.validation)

    def _digest_data(self) -> dict[str, str]:
        digests: dict[str, str] = {}
        match self._data:
            case SupervisedDataset(sequences=sequences):
                digests["data"] = digest_sequences(sequences)
            case TokenStream(datasets=datasets):
                for each in datasets:
                    digests[f"dataset {each.name}"] = digest_blocks(each.reader.blocks)
            case None:
                pass
        for name, held_out in self._held_out.items():
            digests[f"validation dataset {name}"] = digest_sequences(held_out)
        return digests

    def supervised_step(self, step: int) -> StepResult:
        """Train on the batch of a step.

        Raises:
            WrongStateError: the phase has no data.
        """
        match self._data:
            case None:
                raise WrongStateError("the phase has no data")
            case SupervisedDataset():
                batch = self._data.batch(step)
                with self._profile_step():
                    return self._learner.supervised_step(batch)
            case TokenStream():
                batch = self._data.take_batch()
                with self._profile_step():
                    result = self._learner.supervised_step(batch)
                return replace(
                    result,
                    data_cursor=self._data.cursor(),
                    extra=dict(result.extra) | {"data_fill": self._data.fill},
                )

    def held_out_losses(self) -> Mapping[str, float]:
        """Mean loss of a trained token of each held-out dataset, in nats."""
        return {
            name: self._learner.held_out_loss(sequences)
            for name, sequences in self._held_out.items()
        }

    def policy_step(self, batch: PolicyBatch) -> StepResult:
        keys = batch.stored_keys()
        fetched, started = self._spool.count(keys), time.perf_counter()
        read, figures = self._read(batch)
        read_s = time.perf_counter() - started
        with self._profile_step():
            result = self._learner.policy_step(read)
        self._spool.end_step(keys)
        figures = {**figures, "read_seconds": read_s}
        if keys:
            figures["fetched_fraction"] = fetched / len(keys)
        return replace(result, extra={**result.extra, **figures})

    def fetch_contents(self, references: Sequence[bytes], steps: int) -> None:
        """Fetch tokens of finished rollouts ahead of their step; not collective."""
        parse = rollout_content_pb2.ContentObject.FromString
        self._spool.fetch([parse(each) for each in references], steps=steps)

    def measure_divergence(self, batch: PolicyBatch) -> float:
        read, _ = self._read(batch)
        return self._learner.measure_divergence(read)

    def _read(self, batch: PolicyBatch) -> tuple[PolicyBatch, Mapping[str, float]]:
        """Read the rollouts of a batch, and their recorded experts if the phase replays them."""
        ranks = ProcessGroupExchange(self._config.rank, self._config.world_size)
        model = self._learner.policy.config
        limits = TokenLimits(model.vocab_size, model.max_position_embeddings)
        read = BatchReader(source=self._spool, limits=limits, ranks=ranks).read(batch)
        if replay_mode(self._phase) != "Recorded":
            return read, {}
        loader = RouteLoader(store=self._store, ranks=ranks)
        return loader.load(read, self._learner.policy.routers.shape)

    def _profile_step(self) -> AbstractContextManager[None]:
        # The controller names this class, and must not load torch for it.
        from etude.trainer.learner.step_profiler import profile_step  # noqa: PLC0415

        step = self._learner.steps_done + 1
        return profile_step(self._phase, step=step, rank=self._config.rank, store=self._store)

    def encode(self, version: VersionId, base: PublishBase | None) -> RankReceipt:
        """Encode the current weights.

        Raises:
            UserError: the run's storage is a folder that this rank does not share with the others.
        """
        if base is None and folder_of(self._config.storage.uri) is not None:
            self._check_shared_folder(version.epoch)
        return self._learner.encode(version, base)

    def _check_shared_folder(self, epoch: int) -> None:
        """Refuse a folder that lacks the epoch that the controller has written to the run's.

        Raises:
            UserError: it does.
        """
        if epoch not in epochs_of(self._store):
            raise UserError(
                Problem(
                    reason="InvalidStorage",
                    what=f"is another folder for learner rank {self._config.rank}, on host"
                    f" {gethostname()}, than for the run's controller",
                    where=f"storage.uri: {self._config.storage.uri}",
                    fix="use an object store, or mount one folder on every node of the trainer",
                )
            )

    def upload(self, version: VersionId) -> None:
        self._learner.upload(version)

    def copy_state(self, prefix: str) -> None:
        self._learner.copy_state(prefix + LEARNER)

    def save(self, prefix: str) -> list[CheckpointObject]:
        """Store this rank's copied part of the state, and compare it with what was meant.

        Raises:
            StoreError: the store failed, or holds something else.
        """
        stored = []
        for written in self._learner.save(prefix + LEARNER):
            key = written.key.removeprefix(prefix)
            try:
                found = manifest.describe_object(self._store, prefix, key)
            except MissingError as cause:
                raise StoreError(f"{self._store.url}/{written.key}: is gone") from cause
            if (found.size, found.blake3) != (written.size, written.blake3):
                raise StoreError(f"{self._store.url}/{written.key}: differs from what was written")
            stored.append(found)
        return stored

    def export(self, prefix: str) -> list[CheckpointObject]:
        written = self._learner.export(prefix + manifest.MODEL)
        written += self._learner.export_adapter(prefix + manifest.ADAPTER)
        return self._describe_objects(prefix, written)

    def _describe_objects(self, prefix: str, written: list[ObjectInfo]) -> list[CheckpointObject]:
        # Digests of what the store holds, not of what was meant: a bad write is found here.
        return [
            manifest.describe_object(self._store, prefix, info.key.removeprefix(prefix))
            for info in written
        ]

    def restore(self, prefix: str) -> None:
        self._learner.restore(prefix + LEARNER)

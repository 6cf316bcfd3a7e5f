"""Simulated learner and rollout workers, with which a whole controller runs in milliseconds.

The weights are a chain of digests over everything that was trained, so that two runs trained the
same things in the same order exactly when their digests are equal. The published words are a
function of these digests.
"""

import asyncio
import hashlib
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from tests.support.trainer_simulation import weights as simulation_weights
from tests.support.trainer_simulation.weights import SimulatedPublisher
from typing_extensions import override

from etude.agent.chat import ChatFormat
from etude.common.api.run.phases import Phase
from etude.common.blobs import Store
from etude.common.checkpoints import manifest
from etude.common.checkpoints.manifest import CheckpointObject
from etude.common.weights import VersionId
from etude.common.weights.tensors.words import Words
from etude.trainer.export.receipts import PublishBase, RankReceipt
from etude.trainer.learner.batch_reader import BatchReader, TokenLimits
from etude.trainer.learner.batches import PolicyBatch, StepResult
from etude.trainer.learner.content_spool import ContentSpool
from etude.trainer.learner.data.rank_exchange import ProcessGroupExchange
from etude.trainer.learner.protocol import Learners
from etude.trainer.rollouts.contents.content_writer import ContentWriter
from etude.trainer.rollouts.contents.readable_rows import write_readable_rollouts
from etude.trainer.rollouts.protocol import GroupRequest, GroupResult, RolloutWorkers
from etude.trainer.routing.table import RoutingTable
from etude.trainer.seeding import derive_seed
from etude.v1 import environments_pb2, journal_pb2, rewards_pb2, rollout_pb2, weights_pb2
from etude.v1.rollout_content_pb2 import ContentObject

END_ID = 4
VOCABULARY = 256
CONTEXT = 4_096


@dataclass(slots=True)
class SimulatedLearners(Learners):
    """Learner that hashes its batches."""

    store: Store
    weights: str = "initial"
    phase: str = ""
    mismatch: float = 0.0
    """Of tokens of the current version."""
    stale_mismatch: float = 0.0
    """Over all tokens of a step."""
    divergence: float = 0.0
    """From the version that sampled a batch, where it is another one."""
    trained: list[str] = field(default_factory=list)
    """Digest after each step."""
    data_cursors: list[str] = field(default_factory=list)
    """Position in streamed data with which each phase was started."""
    steps_until_crash: int = -1
    """Steps until a simulated crash; -1 for none."""
    before_crash: Callable[[], Awaitable[None]] | None = None
    """Awaited by the step that crashes."""
    copied: bytes = b""
    """State of the checkpoint that is being stored."""
    after_step: Callable[[], None] = lambda: None
    """Called after each step."""
    words: Words = field(default_factory=simulation_weights.initial_words)
    """The published weights."""
    publisher: SimulatedPublisher = field(init=False)
    spool: ContentSpool = field(init=False)
    reader: BatchReader = field(init=False)
    fetches: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def __post_init__(self) -> None:
        self.publisher = SimulatedPublisher(self.store)
        limits = TokenLimits(VOCABULARY, CONTEXT)
        self.spool = ContentSpool(self.store)
        self.reader = BatchReader(
            source=self.spool, limits=limits, ranks=ProcessGroupExchange(0, 1)
        )

    def _advance(self, what: bytes) -> StepResult:
        if self.steps_until_crash == 0:
            raise ConnectionError("a simulated learner died")
        self.steps_until_crash -= 1
        self.weights = hashlib.sha256(self.weights.encode() + what).hexdigest()
        self.words = simulation_weights.step_words(self.words, self.weights)
        self.trained.append(self.weights)
        self.after_step()
        return StepResult(
            loss=int(self.weights[:6], 16) / 2**24,
            grad_norm=1.0,
            tokens=100,
            trained_tokens=50,
            learning_rate=1e-3,
            entropy=0.1,
            mismatch_mean=self.stale_mismatch,
            mismatch_max=self.mismatch,
            weight_digest=self.weights,
            seconds=0.0,
        )

    @override
    async def start_phase(self, phase: Phase, step: int, data_cursor: str = "") -> None:
        self.phase = phase.name
        self.data_cursors.append(data_cursor)

    async def _begin_step(self) -> None:
        await asyncio.sleep(0)
        if self.steps_until_crash == 0 and self.before_crash is not None:
            await self.before_crash()

    @override
    async def supervised_step(self, step: int) -> StepResult:
        await self._begin_step()
        result = self._advance(f"{self.phase}/{step}".encode())
        return replace(result, data_cursor=f"{self.phase} {step + 1}")

    @override
    async def held_out_losses(self) -> Mapping[str, float]:
        await asyncio.sleep(0)
        return {"held-out": 1.0 / (1 + len(self.trained))}

    @override
    async def policy_step(self, batch: PolicyBatch) -> StepResult:
        await self._begin_step()
        keys = batch.stored_keys()
        batch = await asyncio.to_thread(self.reader.read, batch)
        self.spool.end_step(keys)
        tokens = b"".join(sequence.token_ids.tobytes() for sequence in batch.sequences)
        given = b"" if batch.advantages is None else batch.advantages.tobytes()
        result = self._advance(tokens + batch.rewards.tobytes() + batch.valid.tobytes() + given)
        current = [each.is_current for each in batch.sequences if each.is_current is not None]
        if not any(each.any() for each in current):
            return result
        return replace(result, mismatch_current=self.mismatch, current_tokens=300)

    @override
    def fetch_contents(self, references: Sequence[bytes], steps: int) -> None:
        found = [ContentObject.FromString(each) for each in references]
        self.fetches.submit(self.spool.fetch, found, steps=steps)

    @override
    async def measure_divergence(self, batch: PolicyBatch) -> float:
        await asyncio.sleep(0)
        batch = await asyncio.to_thread(self.reader.read, batch)
        spans = [each.is_current for each in batch.sequences if each.is_current is not None]
        return 0.0 if any(each.any() for each in spans) else self.divergence

    @override
    async def encode(self, version: VersionId, base: PublishBase | None) -> list[RankReceipt]:
        return [self.publisher.encode(version, base, self.words)]

    @override
    async def upload(self, version: VersionId) -> None:
        await asyncio.to_thread(self.publisher.upload, version)

    @override
    async def copy_state(self, prefix: str) -> None:
        state = {
            "weights": self.weights,
            "phase": self.phase,
            "words": self.words.tobytes().hex(),
        }
        self.copied = json.dumps(state).encode()

    @override
    async def save(self, prefix: str) -> list[CheckpointObject]:
        self.store.put(f"{prefix}learner/state.json", self.copied)
        return [manifest.describe_object(self.store, prefix, "learner/state.json")]

    @override
    async def restore(self, prefix: str) -> None:
        state = json.loads(self.store.get(f"{prefix}learner/state.json"))
        self.weights, self.phase = state["weights"], state["phase"]
        self.words = np.frombuffer(bytes.fromhex(state["words"]), np.uint8)
        self.publisher.follow(self.words)

    @override
    async def export(self, prefix: str) -> list[CheckpointObject]:
        self.store.put(f"{prefix}model/config.json", b"{}")
        return [manifest.describe_object(self.store, prefix, "model/config.json")]


@dataclass(slots=True)
class SimulatedRollouts(RolloutWorkers):
    """Draws rollouts and their durations from the request's seed."""

    serving: Callable[[], VersionId]
    """Returns the version that engines serve."""
    fault_share: float = 0.0
    """Share of rollouts that the platform loses."""
    longest_s: float = 0.002
    replica: str = "engine-0"
    """Name of the engine process in spans."""
    final_message: Callable[[int], str] = lambda index: ""
    """Last message of a rollout, by its index among its siblings."""
    store: Store | None = None
    """Gets the tokens of rollouts; records hold them where None, as those of older releases."""
    chat: ChatFormat | None = None
    """Format in which rollouts are written for people; without turns where None."""
    orders: list[GroupRequest] = field(default_factory=list)
    tables: list[RoutingTable] = field(default_factory=list)
    """Routing tables in the order of their arrival."""

    @override
    async def run(self, order: GroupRequest) -> GroupResult:
        self.orders.append(order)
        oldest = self.serving()
        await asyncio.sleep(random.Random(order.seed).random() * self.longest_s)
        newest = self.serving()
        records = [self.record(order, index, oldest, newest) for index in order.indices]
        if self.store is not None:
            await ContentWriter(store=self.store, vocab_size=VOCABULARY).write(order, records)
        return GroupResult(
            records=tuple(record.SerializeToString() for record in records),
            retried=0,
            driver="simulated",
            isolation=environments_pb2.ISOLATION_STRONG,
        )

    @property
    @override
    def num_workers(self) -> int:
        return 1

    @override
    async def update_routing(self, table: RoutingTable) -> None:
        self.tables.append(table)

    @override
    async def write_rollouts(self, step: int, split: str, records: Sequence[bytes]) -> None:
        if self.store is not None:
            write_readable_rollouts(self.store, self.chat, step, split, records)

    def record(
        self, order: GroupRequest, index: int, oldest: VersionId, newest: VersionId
    ) -> journal_pb2.JournalRollout:
        draw = random.Random(derive_seed(order.seed, index))
        name = order.rollout_id(index)
        if draw.random() < self.fault_share:
            fault = rewards_pb2.RewardFault(reason="PlatformFault", message="simulated")
            return journal_pb2.JournalRollout(
                rollout=rollout_pb2.Rollout(
                    rollout_id=name,
                    group_id=order.group_id,
                    task_id=order.task_id,
                    index=index,
                    ending=rollout_pb2.ENDING_PLATFORM_FAULT,
                ),
                reward=rewards_pb2.RewardRecord(rollout_id=name, fault=fault),
            )
        sampled = [draw.randrange(5, 20) for _ in range(draw.randrange(1, 8))] + [END_ID]
        success = float(draw.random() < 0.5)
        return journal_pb2.JournalRollout(
            rollout=rollout_pb2.Rollout(
                rollout_id=name,
                group_id=order.group_id,
                task_id=order.task_id,
                index=index,
                seed=order.seed,
                links=[_link([1, 2, 3], sampled, oldest, newest, self.replica)],
                costs=rollout_pb2.Costs(turns=1, completion_tokens=len(sampled)),
                final_message=self.final_message(index),
                ending=rollout_pb2.ENDING_STOPPED,
                oldest=oldest.to_proto(),
                newest=newest.to_proto(),
            ),
            reward=rewards_pb2.RewardRecord(rollout_id=name, reward=success, success=success),
        )


def _link(
    prompt: list[int], sampled: list[int], oldest: VersionId, newest: VersionId, replica: str
) -> rollout_pb2.Link:
    span = weights_pb2.PolicySpan(
        sampled=newest.to_proto(),
        context=oldest.to_proto(),
        start=len(prompt),
        end=len(prompt) + len(sampled),
        replica=replica,
    )
    return rollout_pb2.Link(
        token_ids=prompt + sampled,
        loss_mask=bytes(len(prompt)) + b"\x01" * len(sampled),
        sampler_logprobs=[0.0] * len(prompt) + [-0.5] * len(sampled),
        spans=[span],
    )

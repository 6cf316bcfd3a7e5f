"""The learner of the tiny model in this process, under a whole controller."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from etude.common.api.run.phases import Phase
from etude.common.api.run.weights import Weights
from etude.common.api.storage import Storage
from etude.common.checkpoints.manifest import CheckpointObject
from etude.common.weights import VersionId
from etude.trainer.controller.program import train
from etude.trainer.controller.run import Run
from etude.trainer.export.receipts import PublishBase, RankReceipt
from etude.trainer.learner.batches import PolicyBatch, StepResult
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.protocol import Learners
from etude.trainer.learner.rank import LearnerRank
from etude.trainer.model.policy import Policy
from etude.v1 import rollout_pb2, weights_pb2

MODEL = Path(__file__).parents[2] / "data" / "tiny-model"
PROMPT = [3, 1, 4]


@dataclass(slots=True)
class OneLearner(Learners):
    """A learner rank in threads of this process."""

    config: LearnerConfig
    steps_left: int = 1_000
    """Steps on rewards until a simulated kill."""
    before_step: Callable[[PolicyBatch], None] = lambda batch: None
    """Gets each batch of a policy step before it is trained."""
    rank: LearnerRank = field(init=False)
    fetches: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def __post_init__(self) -> None:
        self.rank = LearnerRank(self.config)
        self.rank.load()

    @property
    def policy(self) -> Policy:
        """The weights that are trained."""
        return self.rank._learner.policy

    @override
    async def start_phase(self, phase: Phase, step: int, data_cursor: str = "") -> None:
        await asyncio.to_thread(self.rank.start_phase, phase.to_json(), step, data_cursor)

    @override
    async def supervised_step(self, step: int) -> StepResult:
        return await asyncio.to_thread(self.rank.supervised_step, step)

    @override
    async def held_out_losses(self) -> Mapping[str, float]:
        return await asyncio.to_thread(self.rank.held_out_losses)

    @override
    async def policy_step(self, batch: PolicyBatch) -> StepResult:
        if not self.steps_left:
            raise ConnectionError("killed")
        self.steps_left -= 1
        self.before_step(batch)
        return await asyncio.to_thread(self.rank.policy_step, batch)

    @override
    def fetch_contents(self, references: Sequence[bytes], steps: int) -> None:
        self.fetches.submit(self.rank.fetch_contents, references, steps)

    @override
    async def measure_divergence(self, batch: PolicyBatch) -> float:
        return await asyncio.to_thread(self.rank.measure_divergence, batch)

    @override
    async def encode(self, version: VersionId, base: PublishBase | None) -> list[RankReceipt]:
        return [await asyncio.to_thread(self.rank.encode, version, base)]

    @override
    async def upload(self, version: VersionId) -> None:
        await asyncio.to_thread(self.rank.upload, version)

    @override
    async def copy_state(self, prefix: str) -> None:
        await asyncio.to_thread(self.rank.copy_state, prefix)

    @override
    async def save(self, prefix: str) -> list[CheckpointObject]:
        return await asyncio.to_thread(self.rank.save, prefix)

    @override
    async def restore(self, prefix: str) -> None:
        await asyncio.to_thread(self.rank.restore, prefix)

    @override
    async def export(self, prefix: str) -> list[CheckpointObject]:
        return await asyncio.to_thread(self.rank.export, prefix)


async def run_controller(
    world: Any,
    *,
    steps_left: int = 1_000,
    prepare: Callable[[Run, OneLearner], None] = lambda run, learner: None,
) -> OneLearner:
    """Run one controller of a world of the tiny model; return its learner.

    Args:
        world: over a store that a URI names, as the ranks of a learner open it.
        steps_left: policy steps until a simulated kill.
        prepare: changes the run before it trains.
    """
    run, sets, checkpoint = world.start()
    learner = OneLearner(
        LearnerConfig(
            run="run",
            holder="test",
            model_folder=MODEL,
            storage=Storage.model_validate(world.spec["storage"]),
            weights=Weights.model_validate(world.spec["weights"]),
        ),
        steps_left,
    )
    run.learners = run.publishing.learners = run.checkpoints.saver.learners = learner
    prepare(run, learner)
    async with asyncio.timeout(120):
        await train(run, sets, checkpoint=checkpoint)
    return learner


def sample(
    policy: Policy, draw: random.Random, *, version: VersionId, length: int = 8
) -> rollout_pb2.Rollout:
    """Sample a rollout from a policy, with the log-probs of its draws."""
    ids, logprobs = list(PROMPT), [0.0] * len(PROMPT)
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    for _ in range(length):
        with torch.no_grad():
            scores = policy.model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        token = int(torch.multinomial(scores.exp(), 1, generator=generator))
        ids.append(token)
        logprobs.append(float(scores[token]))
    span = weights_pb2.PolicySpan(
        sampled=version.to_proto(),
        context=version.to_proto(),
        start=len(PROMPT),
        end=len(ids),
        replica="engine-0",
    )
    link = rollout_pb2.Link(
        token_ids=ids,
        loss_mask=bytes(len(PROMPT)) + b"\x01" * length,
        sampler_logprobs=logprobs,
        spans=[span],
    )
    name = f"{draw.getrandbits(128):032x}"
    return rollout_pb2.Rollout(
        rollout_id=name, links=[link], oldest=version.to_proto(), newest=version.to_proto()
    )

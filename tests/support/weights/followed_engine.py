"""A real engine on the CPU that follows a store, and transformers as its oracle."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.support.weights.model_tensors import schema_of, words_of
from tests.support.weights.publishing import TrainedPolicy
from transformers import AutoConfig, AutoModelForCausalLM

from etude.common.blobs import MemoryStore
from etude.common.weights import VersionId
from etude.common.weights.tensors.schema import Schema
from etude.common.weights.tensors.words import Words
from etude.inference.engine.interface import Finish, LabelSpan, SampleRequest
from etude.inference.engine.replica import Replica
from etude.inference.updates.follower import VersionFollower

PROMPT = [20, 21, 22, 23, 24]
TOLERANCE = 1e-4
"""Two float32 implementations of the same sums; measured 1e-6, one stale weight gives 1e-1."""


@dataclass
class Completion:
    tokens: list[int]
    logprobs: list[float]
    labels: list[LabelSpan]
    finish: Finish


class Oracle:
    """Transformers on the words of one version."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    def words(self) -> dict[str, Words]:
        return words_of(self.model)

    def schema(self) -> Schema:
        return schema_of(self.model)

    @torch.no_grad()
    def logprobs(self, words: dict[str, Words], tokens: Sequence[int]) -> list[float]:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(torch.from_numpy(words[name].view(np.float32)).view(parameter.shape))
        logits = self.model(torch.tensor([[*PROMPT, *tokens]])).logits[0].float()
        table = logits.log_softmax(-1)
        return [float(table[len(PROMPT) - 1 + i, t]) for i, t in enumerate(tokens)]


def learn(policy: TrainedPolicy, share: float = 0.2) -> None:
    """Change some weights so much that it shows."""
    for words in policy.words.values():
        values = words.view(np.float32)
        chosen = policy.random.random(values.size) < share
        values[chosen] += policy.random.standard_normal(int(chosen.sum())).astype(np.float32) * 0.1


@dataclass
class Bench:
    """A real engine, the store that it follows, and what is published there."""

    engine: Replica
    receiver: VersionFollower
    policy: TrainedPolicy
    oracle: Oracle
    store: MemoryStore
    number: int = -1

    def publish(self, *, complete: bool = False) -> VersionId:
        self.number += 1
        return self.policy.publish(self.store, self.number, complete=complete).version

    async def sample(self, request_id: str, *, count: int = 24, **sampling: Any) -> Completion:
        request = SampleRequest(
            request_id=request_id,
            prompt_token_ids=PROMPT,
            max_tokens=count,
            **{"temperature": 0.0, **sampling},
        )
        [piece] = [piece async for piece in self.engine.generate(request)]
        assert piece.finish is not None
        return Completion(
            list(piece.token_ids), list(piece.logprobs), list(piece.labels), piece.finish
        )

    async def assert_exact(self, version: VersionId) -> None:
        """What is sampled now has the log-probabilities of this version."""
        found = await self.sample(f"exact-{version}", temperature=1.0)
        expected = self.oracle.logprobs(self.policy.published[version], found.tokens)
        assert max(abs(a - b) for a, b in zip(found.logprobs, expected, strict=True)) < TOLERANCE
        assert {label.label for label in found.labels} == {str(version)}

"""Two real engines: both sample, and a completion outlives the one that it began on.

The oracle is transformers on the tensors of the version that each token names.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.weights.model_tensors import schema_of, words_of
from tests.support.weights.publishing import TrainedPolicy
from transformers import AutoConfig, AutoModelForCausalLM

from etude.agent.completions import Completion, find_inconsistency
from etude.common import weights
from etude.common.blobs import Store, open_store
from etude.common.rpc import channels
from etude.common.weights import VersionId
from etude.inference.engine.arguments import OWNED
from etude.trainer.rollouts.engine_client import MESSAGE_TOKENS, EngineSampler
from etude.trainer.rollouts.outage import OutageBudget
from etude.trainer.routing.router import Router
from etude.trainer.routing.table import EngineState, RoutingTable
from etude.v1 import inference_pb2_grpc, weights_pb2, weights_pb2_grpc

TOLERANCE = 1e-4
"""Two float32 implementations of the same sums; one stale weight gives 1e-1."""
LENGTH = 200
VOCABULARY = 320
NO_END: frozenset[int] = frozenset()
"""Every completion has its full length."""
DEADLINE_S = 120
START_S = 480
"""Twenty seconds on idle cores."""


def random_model(folder: Path, seed: int) -> Any:
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@torch.no_grad()
def logprobs(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    table = model(torch.tensor([[*prompt, *tokens]])).logits[0].float().log_softmax(-1)
    return [float(table[len(prompt) - 1 + i, t]) for i, t in enumerate(tokens)]


def check_logprobs(done: Completion, prompt: Sequence[int], models: dict[VersionId, Any]) -> None:
    """Each span has the log-probs of the version that it names, over the whole prefix."""
    for span in done.spans:
        assert span.context == span.sampled
        expected = logprobs(models[span.sampled], prompt, done.token_ids)[span.start : span.end]
        assert list(done.logprobs[span.start : span.end]) == pytest.approx(expected, abs=TOLERANCE)


async def until(holds: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110 - an engine announces nothing
            await asyncio.sleep(0.005)


def create_store(folder: Path) -> Store:
    folder.mkdir()
    store = open_store(folder.as_uri())
    weights.claim_epoch(store, holder="test", parent=None, reason="start")
    return store


PROMPT_TAIL = [21, 22, 23]


def prompt_of(group: int) -> list[int]:
    return [20 + group, *PROMPT_TAIL]


class Fleet:
    """Two engines over one store, and a router that knows both."""

    def __init__(self, roles: Sequence[Any]) -> None:
        self.targets = [f"127.0.0.1:{role.grpc_port}" for role in roles]
        self.channels = {target: channels.dial(target) for target in self.targets}
        live = tuple((target, EngineState.LIVE) for target in self.targets)
        self.router = Router(table=RoutingTable(revision=1, engines=live))

    def weight_stub(self, place: int) -> Any:
        return weights_pb2_grpc.WeightServiceStub(self.channels[self.targets[place]])

    async def commit(self, place: int, version: VersionId) -> None:
        request = weights_pb2.CommitVersionRequest(version=version.to_proto())
        stub = self.weight_stub(place)
        await stub.CommitVersion(request, timeout=START_S, wait_for_ready=True)

    async def sample(self, group: int) -> Completion:
        sampler = EngineSampler(
            engine_of=lambda target: inference_pb2_grpc.InferenceServiceStub(self.channels[target]),
            router=self.router,
            group_id=f"g{group}",
            rollout_id=f"g{group}-0",
            end_ids=NO_END,
            outage=OutageBudget(DEADLINE_S),
            timeout_s=DEADLINE_S,
        )
        done = await sampler.generate(
            prompt_of(group), max_tokens=LENGTH, temperature=1.0, seed=group
        )
        wrong = find_inconsistency(done, max_tokens=LENGTH, vocab_size=VOCABULARY, end_ids=NO_END)
        assert wrong == ""
        return done

    async def close(self) -> None:
        for channel in self.channels.values():
            await channel.close()


@pytest.mark.long
async def test_both_engines_sample_and_a_killed_one_costs_no_delivered_token(
    make_role: Any, make_model: Any, tmp_path: Path
) -> None:
    shared = tmp_path / "store"
    store = create_store(shared)
    folder = make_model(tmp_path / "model")
    models = {VersionId(1, n): random_model(folder, n) for n in range(2)}
    old, new = models
    policy = TrainedPolicy(schema_of(models[old]), words_of(models[old]))
    policy.publish(store, old.number, complete=True, run="uid-tiny")
    roles = [
        make_role(tmp_path / f"{n}", folder, shared=shared, pod=f"tiny-inference-{n}")
        for n in range(2)
    ]
    fleet = Fleet(roles)
    await asyncio.gather(*(fleet.commit(place, old) for place in range(2)))

    whole = await asyncio.gather(*(fleet.sample(n) for n in range(8)))
    replicas = [done.spans[0].replica for done in whole]
    assert sorted(map(replicas.count, set(replicas))) == [4, 4]
    for n, done in enumerate(whole):
        check_logprobs(done, prompt_of(n), models)

    pin = weights_pb2.SetTargetRequest(version=old.to_proto())
    await fleet.weight_stub(0).SetTarget(pin, timeout=DEADLINE_S)
    policy.words = words_of(models[new])
    policy.publish(store, new.number, run="uid-tiny")
    await fleet.commit(1, new)
    running = asyncio.gather(*(fleet.sample(n) for n in range(8, 16)))
    doomed = fleet.targets[0]
    await until(lambda: fleet.router.own_loads().get(doomed, (0, 0))[1] > 2 * MESSAGE_TOKENS)
    roles[0].kill()
    survivors = await running
    await fleet.close()

    for n, done in enumerate(survivors, start=8):
        check_logprobs(done, prompt_of(n), models)
    moved = [done for done in survivors if len({span.replica for span in done.spans}) == 2]
    assert moved
    for done in moved:
        assert [span.sampled for span in done.spans] == [old, new]


@pytest.mark.long
def test_the_arguments_that_are_set_elsewhere_are_arguments_of_the_installed_vllm() -> None:
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    known = {field.name for field in dataclasses.fields(arg_utils.AsyncEngineArgs)}
    assert set(OWNED) <= known

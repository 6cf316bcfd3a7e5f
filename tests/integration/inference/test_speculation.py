"""The real engine with a head that guesses tokens: distributions, versions and their swaps.

Tests run in order on one engine in this process: a start costs ten seconds. The oracle is
transformers on the published words.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from prometheus_client import REGISTRY
from tests.support.weights.followed_engine import PROMPT, Bench, Oracle, learn
from tests.support.weights.publishing import TrainedPolicy

from etude.common import weights
from etude.common.api.run.engine_settings import EngineSettings
from etude.common.api.storage import Storage
from etude.common.blobs import MemoryStore
from etude.inference.engine import replica as replicas
from etude.inference.settings import EngineOptions
from etude.inference.status import ReplicaStatus
from etude.inference.updates.follower import VersionFollower
from etude.inference.updates.staging import Stager
from etude.trainer.learner.batches import SupervisedSequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.learner import Learner

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUN = "uid-run"
SAMPLES = 3_000
PHASE = {
    "name": "sft",
    "type": "SupervisedFineTuning",
    "maxSteps": 40,
    "optimizer": {"learningRate": "3e-3"},
    "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
    "mtp": {"lossWeight": "1"},
}
HEADS: dict[str, object] = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


class TrainedOracle(Oracle):
    """Transformers on a model with a head that agrees with it here and there."""

    def __init__(self, folder: Path, store: Path) -> None:
        storage = Storage(uri=store.as_uri())
        learner = Learner(LearnerConfig(run=RUN, holder="t", model_folder=folder, storage=storage))
        learner.start_phase(PHASE, 0)
        rng = np.random.default_rng(0)
        starts = rng.integers(20, 300, 12)
        texts = [
            SupervisedSequence(
                token_ids=((start + np.arange(32)) % 300).astype(np.int32),
                weights=np.ones(32, np.float32),
            )
            for start in starts
        ]
        for _ in range(40):
            self.agreement = learner.supervised_step(texts).extra["mtp_agreement"]
        self.model = learner.policy.model.requires_grad_(requires_grad=False)

    def table(self, prefixes: list[list[int]]) -> torch.Tensor:
        """Distribution of the token behind each prefix; all have one length."""
        distributions: torch.Tensor = self.model(torch.tensor(prefixes)).logits[:, -1].softmax(-1)
        return distributions


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=[True, False])
async def bench(
    request: pytest.FixtureRequest,
    make_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Bench]:
    folder = tmp_path_factory.mktemp("speculation")
    model = make_model(folder / "model", tie_word_embeddings=request.param, **HEADS)
    options = EngineOptions(
        model=model,
        served_name="tiny",
        dtype="float32",
        max_model_len=256,
        max_concurrent=64,
        kv_cache_bytes=64 << 20,
        gpus=0,
        follows_store=True,
        threads=torch.get_num_threads(),
        engine=EngineSettings(speculative_tokens=1),
    )
    os.environ.update(options.environment())
    torch._dynamo.config.disable = True
    oracle = TrainedOracle(model, folder / "store")
    engine = replicas.build_replica(options)
    store = MemoryStore()
    weights.claim_epoch(store, holder="t", parent=None, reason="start")
    receiver = VersionFollower(
        stager=Stager(store, RUN, folder / "scratch"),
        engine=engine,
        status=ReplicaStatus(replica="r-0"),
    )
    yield Bench(engine, receiver, TrainedPolicy(oracle.schema(), oracle.words()), oracle, store)
    engine.shutdown()


def of_draft(bench: Bench) -> dict[str, torch.Tensor]:
    """Parameters of the engine's head."""
    core = bench.engine.llm.engine_core._core
    runner = core.model_executor.driver_worker.worker.model_runner
    layers = dict(runner.drafter.model.model.mtp_layers.named_parameters())
    return {name: p.detach().clone() for name, p in layers.items()}


async def test_a_version_has_the_head_and_all_of_it_is_live(bench: Bench) -> None:
    version = bench.publish(complete=True)
    await bench.receiver.catch_up()
    await bench.assert_exact(version)
    assert await bench.engine.swap.audit()
    words = bench.policy.published[version]["model.mtp_layers.0.input_proj.weight"]
    [found] = [p for name, p in of_draft(bench).items() if name.endswith("input_proj.weight")]
    assert np.array_equal(found.numpy().reshape(-1).view(np.uint32), words)


async def test_greedy_tokens_are_the_models_own(bench: Bench) -> None:
    assert isinstance(bench.oracle, TrainedOracle)
    found = await bench.sample("greedy", count=40)
    prefix = list(PROMPT)
    for token in found.tokens:
        assert token == int(bench.oracle.table([prefix])[0].argmax())
        prefix.append(token)


def num_guessed() -> float:
    """Guessed tokens of this process's engines, accepted or not."""
    name = "vllm:spec_decode_num_draft_tokens_total"
    return sum(s.value for f in REGISTRY.collect() for s in f.samples if s.name == name)


async def test_guesses_stop_and_begin_while_the_engine_runs(bench: Bench) -> None:
    before = num_guessed()
    guessed = await bench.sample("on", count=40)
    with_guesses = num_guessed()
    assert with_guesses > before
    tokens = bench.engine.read_counts().tokens
    await bench.engine.set_speculation(is_on=False)
    await bench.sample("draining", count=4)  # the first step has a guess of the last one
    between = num_guessed()
    assert (await bench.sample("off", count=40)).tokens == guessed.tokens
    assert num_guessed() == between
    assert bench.engine.read_counts().tokens >= tokens + 44
    await bench.engine.set_speculation(is_on=True)
    assert (await bench.sample("again", count=40)).tokens == guessed.tokens
    assert num_guessed() > between


async def test_sampled_tokens_have_the_models_distribution(bench: Bench) -> None:
    assert isinstance(bench.oracle, TrainedOracle)
    runs = [bench.sample(f"s-{i}", count=3, temperature=1.0) for i in range(SAMPLES)]
    found = await asyncio.gather(*runs)
    first = bench.oracle.table([PROMPT])[0]
    every = list(range(len(first)))
    second = bench.oracle.table([[*PROMPT, token] for token in every])
    expected = (first[:, None] * second).sum(0)
    counts = torch.bincount(torch.tensor([f.tokens[1] for f in found]), minlength=len(first))
    likely = expected * SAMPLES >= 8
    assert likely.sum() >= 5
    differences = (counts - expected * SAMPLES)[likely] / (expected * SAMPLES)[likely].sqrt()
    # The sum of squares is chi-square with at most this many degrees of freedom.
    freedom = int(likely.sum())
    assert float(differences.square().sum()) < freedom + 5 * (2 * freedom) ** 0.5
    for each in found[:50]:
        exact = bench.oracle.logprobs(bench.policy.words, each.tokens)
        assert max(abs(a - b) for a, b in zip(each.logprobs, exact, strict=True)) < 1e-4


async def test_a_delta_swaps_head_and_model_at_once(bench: Bench) -> None:
    before = of_draft(bench)
    for _ in range(2):
        learn(bench.policy)
        version = bench.publish()
        await bench.receiver.catch_up()
        await bench.assert_exact(version)
        assert await bench.engine.swap.audit()
    assert not any(torch.equal(before[name], p) for name, p in of_draft(bench).items())


async def test_requests_run_through_swaps_and_their_spans_cover_every_token(bench: Bench) -> None:
    running = [
        asyncio.create_task(bench.sample(f"load-{i}", count=200, temperature=1.0), name=f"load-{i}")
        for i in range(4)
    ]
    for _ in range(3):
        await asyncio.sleep(0.1)
        learn(bench.policy, 0.01)
        bench.publish()
        await bench.receiver.catch_up()
    for task in running:
        found = await task
        ends = [label.end for label in found.labels]
        assert [label.start for label in found.labels] == [0, *ends[:-1]]
        assert ends[-1] == 200 == len(found.tokens)

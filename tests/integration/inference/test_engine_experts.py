"""Mixtures of experts on a real CPU engine: every version exact, whole and as a change."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from tests.support.weights.followed_engine import PROMPT, Bench, Oracle, learn
from tests.support.weights.publishing import TrainedPolicy
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)
from typing_extensions import override

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.routed_experts import RouteDraft
from etude.common.weights import VersionId
from etude.common.weights.tensors.schema import Schema, TensorSpec, split_of
from etude.common.weights.tensors.words import Words
from etude.inference.engine import replica as replicas
from etude.inference.engine.interface import SampleRequest
from etude.inference.settings import EngineOptions
from etude.inference.status import ReplicaStatus
from etude.inference.updates.follower import VersionFollower
from etude.inference.updates.staging import Stager

EXPERTS, WIDTH = 4, 24
"""A width that vLLM's own CPU kernel refuses: it takes multiples of 32."""
SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "moe_intermediate_size": WIDTH,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
QWEN = Qwen3MoeConfig(
    **SMALL,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=EXPERTS,
    architectures=["Qwen3MoeForCausalLM"],
)
DEEPSEEK = DeepseekV3Config(
    **SMALL,
    num_key_value_heads=4,
    n_routed_experts=EXPERTS,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=0,
    q_lora_rank=32,
    # The sizes of DeepSeek-V3's cache: vLLM's latent attention on CPUs takes no others.
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=32,
    v_head_dim=32,
    num_nextn_predict_layers=0,
    # What published folders say, and transformers takes for granted.
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    architectures=["DeepseekV3ForCausalLM"],
)


class ExpertsOracle(Oracle):
    """Stacks the experts' tensors, of which a checkpoint has one each."""

    @override
    def words(self) -> dict[str, Words]:
        found: dict[str, Words] = {}
        for name, tensor in self.model.state_dict().items():
            for part, value in self._parts(name, tensor):
                found[part] = np.ascontiguousarray(value.numpy()).view(np.uint32).reshape(-1).copy()
        return found

    @override
    def schema(self) -> Schema:
        tensors = [
            TensorSpec(name=part, dtype="F32", shape=tuple(value.shape), split=split_of(part))
            for name, tensor in self.model.state_dict().items()
            for part, value in self._parts(name, tensor)
        ]
        return Schema(grid=8, tensors=tuple(sorted(tensors, key=lambda spec: spec.name)))

    def _parts(self, name: str, value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        layer, _, kind = name.partition(".experts.")
        if not kind:
            return [(name, value)]
        parts = []
        for expert in range(EXPERTS):
            halves = {
                "gate_up_proj": {
                    "gate_proj": value[expert][:WIDTH],
                    "up_proj": value[expert][WIDTH:],
                },
                "down_proj": {"down_proj": value[expert]},
            }[kind]
            parts += [(f"{layer}.experts.{expert}.{n}.weight", half) for n, half in halves.items()]
        return parts

    @override
    def logprobs(self, words: dict[str, Words], tokens: Sequence[int]) -> list[float]:
        state = self.model.state_dict()
        stacked = {
            name: np.concatenate([words[part] for part, _ in self._parts(name, tensor)])
            for name, tensor in state.items()
        }
        for name, buffer in self.model.named_buffers():
            if name in state:  # the bias of DeepSeek's routers
                buffer.copy_(torch.from_numpy(stacked[name].view(np.float32)))
        return super().logprobs(stacked, tokens)


@pytest_asyncio.fixture(params=[QWEN, DEEPSEEK], ids=["qwen3", "deepseek"])
async def bench(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    config: PretrainedConfig = request.param
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(320)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1")
    tokenizer.save_pretrained(tmp_path / "model")
    options = EngineOptions(
        model=tmp_path / "model",
        served_name="experts",
        dtype="float32",
        max_model_len=256,
        max_concurrent=4,
        kv_cache_bytes=64 << 20,
        gpus=0,
        follows_store=True,
        threads=torch.get_num_threads(),
    )
    os.environ.update(options.environment())
    torch._dynamo.config.disable = True
    engine = replicas.build_replica(options)
    oracle = ExpertsOracle(options.model)
    store = MemoryStore()
    weights.claim_epoch(store, holder="t", parent=None, reason="start")
    policy = TrainedPolicy(oracle.schema(), oracle.words())
    receiver = VersionFollower(
        stager=Stager(store, "uid-run", tmp_path / "scratch"),
        engine=engine,
        status=ReplicaStatus(replica="r-0"),
    )
    yield Bench(engine, receiver, policy, oracle, store)
    engine.shutdown()


async def test_experts_are_exact_in_every_version_that_is_live(bench: Bench) -> None:
    version = bench.publish(complete=True)
    await bench.receiver.catch_up()
    await bench.assert_exact(version)
    for _ in range(3):
        learn(bench.policy)
        version = bench.publish()
        await bench.receiver.catch_up()
        await bench.assert_exact(version)
        assert await bench.engine.swap.audit()


async def turn(bench: Bench, name: str, prompt: list[int], held: int = 0) -> tuple[list[int], Any]:
    request = SampleRequest(
        request_id=name,
        prompt_token_ids=prompt,
        max_tokens=40,
        temperature=1.0,
        seed=7,
        chunk_tokens=16,
        routes_from=held,
    )
    pieces = [piece async for piece in bench.engine.generate(request)]
    draft = RouteDraft()
    for piece in pieces:
        if piece.routes is not None:
            draft.add(piece.routes)
    tokens = [*prompt, *(token for piece in pieces for token in piece.token_ids)]
    assert len(pieces) > 2
    rows = draft.rows()
    assert rows is not None
    return tokens, rows.ids


def expected_routes(bench: Bench, tokens: list[int], version: VersionId | None = None) -> Any:
    """Experts of the tokens by transformers' own routers, lowest id first."""
    words = bench.policy.words if version is None else bench.policy.published[version]
    bench.oracle.logprobs(words, [20])  # fills its model
    found: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _m, _a, result: found.append(result[2]))
        for module in bench.oracle.model.modules()
        if type(module).__name__ in ("Qwen3MoeTopKRouter", "DeepseekV3TopkRouter")
    ]
    with torch.no_grad():
        bench.oracle.model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).sort(-1).values.numpy()


async def test_recorded_experts_are_those_that_the_routers_chose(bench: Bench) -> None:
    bench.publish(complete=True)
    await bench.receiver.catch_up()
    shared = [int(i) for i in np.random.default_rng(0).integers(20, 300, 70)]
    # A prefix that was cached before anybody asked for experts is computed again.
    request = SampleRequest(
        request_id="earlier", prompt_token_ids=shared, max_tokens=4, temperature=1.0
    )
    [_] = [piece async for piece in bench.engine.generate(request)]
    # Requests run side by side; the later ones find blocks of the first in the prefix cache.
    first = await turn(bench, "first", shared)
    others = await asyncio.gather(
        *(turn(bench, f"other-{i}", [*shared, 30 + i]) for i in range(3)),
        turn(bench, "next-turn", [*first[0], 25, 26], held=len(first[0]) - 1),
    )
    for tokens, routes in (first, *others):
        assert routes.dtype == np.uint8
        assert routes.shape == (len(tokens) - 1, 2, 2)
        held = len(first[0]) - 1 if tokens[: len(first[0])] == first[0] != tokens else 0
        assert (routes[:held] == 255).all()  # only what is asked for is sent
        expected = expected_routes(bench, tokens)[:-1]
        assert (np.sort(routes, -1) == expected)[held:].all()


@pytest.mark.parametrize("bench", [QWEN], ids=["qwen3"], indirect=True)
async def test_a_token_keeps_the_experts_that_gave_the_next_one_when_a_swap_computes_it_again(
    bench: Bench,
) -> None:
    bench.engine.options = replace(bench.engine.options, pause="InFlight", recompute_kv=True)
    first = bench.publish(complete=True)
    await bench.receiver.catch_up()
    await turn(bench, "starts-to-record", [20, 21])
    request = SampleRequest(
        request_id="swapped",
        prompt_token_ids=PROMPT,
        max_tokens=200,
        temperature=1.0,
        seed=7,
        routes_from=0,
    )
    running = asyncio.create_task(anext(bench.engine.generate(request)), name="swapped")
    await asyncio.sleep(0.2)
    learn(bench.policy)
    second = bench.publish()
    await bench.receiver.catch_up()
    piece = await running
    assert piece.routes is not None
    tokens, routes = [*PROMPT, *piece.token_ids], np.sort(piece.routes.ids, -1)
    swap = piece.labels[-1].start
    assert 0 < swap < 200
    # The token before the first one of the new version gave it.
    end = len(PROMPT) + swap - 1
    before, after = (expected_routes(bench, tokens, each)[:-1] for each in (first, second))
    assert (routes[:end] == before[:end]).all()
    assert (routes[end:] == after[end:]).all()
    assert (before[:end] != after[:end]).any()

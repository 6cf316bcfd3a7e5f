"""Mixtures of experts: mismatch of engine and learner with live and with replayed routers.

python bench/moe.py [--layers 4] [--steps 100]

A small Qwen3-MoE of bytes learns the project's own pages, on the CPU, and is published in bf16. The
real engine follows the version, samples completions and records the experts of every token. The
learner scores them by its fp32 weights; a token's mismatch is the difference of both log-probs.
  mismatch_p99_off       with the learner's live routers, the peer
  mismatch_p99_replay    with the engine's experts replayed
  mismatch_p99_at        by plausibility: an expert is replayed if its score is at least this part
                         of the k-th best live one
  disagreement           share of choices of a token in a layer that the live routers make otherwise

Examples:
  make bench-moe
  python bench/moe.py --steps 10   a first look
"""

import argparse
import asyncio
import os
import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).parents[1]))  # figures are recorded as tests do

from tests.support import figures

from etude.common import weights
from etude.common.api.run.weights import Weights
from etude.common.api.storage import Storage
from etude.common.blobs import Store, open_store
from etude.common.weights import VersionId
from etude.common.weights.protocol import publication
from etude.inference.engine.interface import SampleRequest
from etude.inference.settings import EngineOptions
from etude.trainer.export.receipts import build_manifest
from etude.trainer.learner.batches import SupervisedSequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.gradients import microbatch_losses
from etude.trainer.learner.learner import Learner
from etude.trainer.learner.rows import TrainingRow
from etude.trainer.learner.sequence_packing import Microbatch, Packing
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.output_head import TokenScores

ROOT = Path(__file__).parents[1]
VOCABULARY, WIDTH, CONTEXT, EXPERTS, CHOICES = 320, 128, 256, 8, 2
SEQUENCES, LENGTH = 16, 128
"""Of one step."""
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 64, 48, 96
PLAUSIBILITIES = (0.0, 0.25, 0.5, 0.75, 1.0)
PHASE = {
    "name": "bench",
    "type": "SupervisedFineTuning",
    "maxSteps": 100_000,
    "optimizer": {"learningRate": "2e-3", "warmupSteps": 10},
    "data": [{"name": "pages", "uri": "file:///pages.jsonl"}],
}


def read_pages() -> NDArray[np.int32]:
    """Bytes of the project's pages, one behind the other."""
    texts = [path.read_bytes() for path in sorted((ROOT / "docs").rglob("*.md"))]
    return np.frombuffer(b"\n\n".join(texts), np.uint8).astype(np.int32)


def train(folder: Path, *, layers: int, steps: int) -> Learner:
    """Train a mixture of experts on the pages."""
    Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=2 * WIDTH,
        moe_intermediate_size=WIDTH // 2,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOICES,
        norm_topk_prob=True,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(folder / "model")
    learner = Learner(
        LearnerConfig(
            run="bench",
            holder="bench",
            model_folder=folder / "model",
            storage=Storage(uri=(folder / "run").as_uri()),
            weights=Weights(dtype="BFloat16"),
            threads=2,
        )
    )
    learner.start_phase(PHASE, 0)
    pages, draw = read_pages(), np.random.default_rng(0)
    for _ in range(steps):
        starts = draw.integers(0, pages.size - LENGTH, SEQUENCES)
        learner.supervised_step(
            [
                SupervisedSequence(
                    token_ids=pages[s : s + LENGTH], weights=np.ones(LENGTH, np.float32)
                )
                for s in starts
            ]
        )
    return learner


def publish(learner: Learner, store: Store) -> None:
    """Publish the learner's weights as the first version of a run."""
    weights.claim_epoch(store, holder="bench", parent=None, reason="start")
    version = VersionId(1, 0)
    receipt = learner.encode(version, None)
    learner.upload(version)
    manifest = build_manifest(
        [receipt], run="bench", version=version, step=0, holder="bench", base=None
    )
    publication.publish_manifest(store, manifest)


async def sample(folder: Path, store: Store) -> list[TrainingRow]:
    """Sample from an engine that follows the run; rows with the engine's log-probs and experts."""
    options = EngineOptions(
        model=folder / "model",
        served_name="bench",
        dtype="bfloat16",
        max_model_len=CONTEXT,
        max_concurrent=16,
        kv_cache_bytes=128 << 20,
        gpus=0,
        follows_store=True,
        threads=2,
    )
    os.environ.update(options.environment())
    torch._dynamo.config.disable = True
    from etude.inference.engine import replica  # noqa: PLC0415 - reads the environment
    from etude.inference.status import ReplicaStatus  # noqa: PLC0415 - as above
    from etude.inference.updates.follower import VersionFollower  # noqa: PLC0415 - as above
    from etude.inference.updates.staging import Stager  # noqa: PLC0415 - as above

    engine = replica.build_replica(options)
    stager = Stager(store, "bench", folder / "scratch")
    await VersionFollower(
        stager=stager, engine=engine, status=ReplicaStatus(replica="bench")
    ).catch_up()
    await engine.record_routes()
    pages = read_pages()
    starts = np.linspace(0, pages.size - PROMPT_TOKENS, PROMPTS).astype(int)
    prompts = [pages[start : start + PROMPT_TOKENS].tolist() for start in starts]
    return await asyncio.gather(*(_sample_row(engine, i, p) for i, p in enumerate(prompts)))


async def _sample_row(engine: Any, index: int, prompt: list[int]) -> TrainingRow:  # noqa: ANN401 - its module imports vLLM
    request = SampleRequest(
        request_id=f"bench-{index}",
        prompt_token_ids=prompt,
        max_tokens=ANSWER_TOKENS,
        temperature=1.0,
        seed=index,
    )
    [chunk] = [chunk async for chunk in engine.generate(request)]
    routes = await engine.take_routes(request.request_id)
    missing = np.full((1, *routes.shape[1:]), np.iinfo(routes.dtype).max, routes.dtype)
    tokens = np.array([*prompt, *chunk.token_ids], dtype=np.int32)
    count = len(chunk.token_ids)
    return TrainingRow(
        token_ids=tokens,
        places=np.arange(len(prompt), len(tokens)),
        weights=np.ones(count, np.float32),
        sampler_logprobs=np.array(chunk.logprobs, dtype=np.float32),
        advantages=np.zeros(count, np.float32),
        is_current=np.ones(count, np.bool_),
        routes=np.concatenate([routes, missing]),
    )


@torch.no_grad()
def mismatches(learner: Learner, rows: list[TrainingRow]) -> NDArray[np.float32]:
    """Absolute differences of log-probs of all sampled tokens."""
    found: list[Tensor] = []

    def record(scores: TokenScores, microbatch: Microbatch) -> Tensor:
        found.append((scores.logprobs - microbatch.sampler_logprobs).abs())
        return scores.logprobs.sum()

    alone = RankGroup(rank=0, size=1, device=torch.device("cpu"))
    packing = Packing(max_tokens=4_096)
    for _ in microbatch_losses(learner.policy, rows, record, ranks=alone, packing=packing):
        pass
    return torch.cat(found).numpy()


def disagreement(learner: Learner, rows: list[TrainingRow]) -> float:
    """Share of the sampled tokens' choices, by layer, that the live routers make otherwise."""
    live: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _m, _a, result: live.append(result[2]))
        for module in learner.policy.model.modules()
        if type(module).__name__ == "Qwen3MoeTopKRouter"
    ]
    differing = total = 0
    learner.policy.replay_routes(None)
    for row in rows:
        live.clear()
        with torch.no_grad():
            learner.policy.model(input_ids=torch.from_numpy(row.token_ids.astype(np.int64))[None])
        assert row.routes is not None  # noqa: S101 - all rows were sampled with their routes
        ours = torch.stack(live, 1).sort(-1).values.numpy()[:-1]
        differs = (ours != np.sort(row.routes, -1)[:-1]).any(-1)
        differing += int(differs.sum())
        total += differs.size
    for hook in hooks:
        hook.remove()
    return differing / total


def measure(learner: Learner, rows: list[TrainingRow]) -> dict[str, float]:
    """Figures of all ways to route."""
    by_plausibility: dict[float, float] = {}
    means: dict[float, float] = {}
    for plausibility in PLAUSIBILITIES:
        learner.policy.routers.plausibility = plausibility
        values = mismatches(learner, rows)
        by_plausibility[plausibility] = float(np.quantile(values, 0.99))
        means[plausibility] = float(values.mean())
    off = mismatches(learner, [replace(row, routes=None) for row in rows])
    p99_off = float(np.quantile(off, 0.99))
    return {
        "mismatch_p99_off": p99_off,
        "mismatch_p99_replay": by_plausibility[0.0],
        "ratio_p99": p99_off / by_plausibility[0.0],
        "mismatch_mean_off": float(off.mean()),
        "mismatch_mean_replay": means[0.0],
        "disagreement": disagreement(learner, rows),
        "tokens": float(off.size),
    } | {f"mismatch_p99_at_{p:g}": value for p, value in by_plausibility.items()}


def main() -> None:
    """Train, publish, sample, score, print, and write bench/out/moe.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100, help="of training before the version")
    chosen = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="etude-moe-") as name:
        folder = Path(name)
        learner = train(folder, layers=chosen.layers, steps=chosen.steps)
        store = open_store((folder / "run").as_uri())
        publish(learner, store)
        rows = asyncio.run(sample(folder, store))
        found = measure(learner, rows)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    found["seconds"] = time.monotonic() - began
    found["cpu_seconds"] = usage.ru_utime + usage.ru_stime
    table = Table("figure", "value", title=f"{chosen.layers} layers, {chosen.steps} steps")
    for key, value in found.items():
        table.add_row(key, f"{value:.5g}")
    Console().print(table)
    figures.record("moe", **{key: float(f"{value:.5g}") for key, value in found.items()})
    sys.stdout.flush()
    os._exit(0)  # the engine's threads would be waited for


if __name__ == "__main__":
    main()

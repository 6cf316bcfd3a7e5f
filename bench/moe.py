"""Mixtures of experts: mismatch of engine and learner with live and with replayed routers.

python bench/moe.py [--layers 4] [--steps 100] [--seeds 3] [--rl-steps 20]

A small Qwen3-MoE of bytes learns the project's own pages, on the CPU, and is published in bf16. The
real engine follows the version, samples completions and records the experts of every token. The
learner scores them by its fp32 weights; a token's mismatch is the difference of both log-probs.
  mismatch_p99_off       with the learner's live routers, the peer
  mismatch_p99_replay    with the engine's experts replayed
  mismatch_p99_at        by plausibility: an expert is replayed if its score is at least this part
                         of the k-th best live one
  disagreement           share of all pairs of a token and a layer, prompts included, in which the
                         live routers choose another set of experts
Then, for each seed in a process of its own, the policy learns a small task by reinforcement, on
rollouts of the engine, which follows it; once with live and once with replayed routers. Figures
are means over seeds and steps, rewards those of the last quarter of the steps.
  rl_reward_*, rl_mismatch_p99_*, rl_mismatch_kl_*   of the arms off and replay, each as it trains
  rl_p99_ratio, rl_kl_ratio   live over replayed, of the same tokens by the same weights: the mean
                              over all steps of both arms, of which the policies differ
Last, four ranks as FSDP 2 x expert 2 make three steps that one rank makes too, in fp32:
  grad_diff_ep     largest difference of a gradient of the last step, over the largest gradient
  norm_diff_ep, loss_diff_ep, weight_diff_ep   largest differences over the steps, and after them
  ep_cpu_seconds   of rank 0, which makes the steps of both

Examples:
  make bench-moe
  python bench/moe.py --steps 10   a first look
  python bench/moe.py --only ep    the four ranks alone
"""

import argparse
import asyncio
import json
import os
import resource
import subprocess
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

from moe_bench.divided_experts import compare_ranks
from moe_bench.reinforcement import StepFigures, learn, open_learner, publish
from tests.support import figures

from etude.common import weights
from etude.common.blobs import Store, open_store
from etude.common.routed_experts import RouteDraft
from etude.inference.engine.interface import SampleRequest
from etude.inference.settings import EngineOptions
from etude.trainer.learner.batches import SupervisedSequence
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
MAX_CONCURRENT = 64
ARMS = ("off", "replay")
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


def train(folder: Path, *, layers: int, steps: int, seed: int = 0) -> Learner:
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
    learner = open_learner(folder, folder / "model", seed=seed)
    learner.start_phase(PHASE, 0)
    pages, draw = read_pages(), np.random.default_rng(seed)
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


def open_engine(folder: Path, store: Store) -> tuple[Any, Any]:
    """An engine, and its follower of the run; it starts with the next version that it is to get."""
    options = EngineOptions(
        model=folder / "model",
        served_name="bench",
        dtype="bfloat16",
        max_model_len=CONTEXT,
        max_concurrent=MAX_CONCURRENT,
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
    follower = VersionFollower(
        stager=Stager(store, "bench", folder / "scratch"),
        engine=engine,
        status=ReplicaStatus(replica="bench"),
    )
    return engine, follower


async def sample(folder: Path, store: Store) -> list[TrainingRow]:
    """Sample from an engine that follows the run; rows with the engine's log-probs and experts."""
    engine, follower = open_engine(folder, store)
    await follower.catch_up()
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
        routes_from=0,
    )
    [chunk] = [chunk async for chunk in engine.generate(request)]
    draft = RouteDraft()
    draft.add(chunk.routes)
    routes = draft.pad_to(len(prompt) + len(chunk.token_ids))
    assert routes is not None  # noqa: S101 - the chunk has rows
    tokens = np.array([*prompt, *chunk.token_ids], dtype=np.int32)
    count = len(chunk.token_ids)
    return TrainingRow(
        token_ids=tokens,
        places=np.arange(len(prompt), len(tokens)),
        weights=np.ones(count, np.float32),
        sampler_logprobs=np.array(chunk.logprobs, dtype=np.float32),
        advantages=np.zeros(count, np.float32),
        is_current=np.ones(count, np.bool_),
        routes=routes.ids,
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
    """Share of the pairs of a token and a layer in which live routers choose other experts.

    Tokens of prompts count too; the last of each row, which has no recorded experts, does not.
    """
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


def start_run(folder: Path) -> Store:
    """The store of a run that has begun."""
    store = open_store((folder / "run").as_uri())
    weights.claim_epoch(store, holder="bench", parent=None, reason="start")
    return store


def compare_routing(layers: int, steps: int) -> dict[str, float]:
    """Figures of one version, all ways to route."""
    with tempfile.TemporaryDirectory(prefix="etude-moe-") as name:
        folder = Path(name)
        learner = train(folder, layers=layers, steps=steps)
        store = start_run(folder)
        publish(learner, store, 0)
        return measure(learner, asyncio.run(sample(folder, store)))


async def learn_both(chosen: argparse.Namespace, folder: Path) -> dict[str, list[StepFigures]]:
    """Train both arms of a seed from the same weights, on one engine."""
    seed: int = chosen.seed
    learner = train(folder, layers=chosen.layers, steps=chosen.steps, seed=seed)
    learner.export("base")
    store = start_run(folder)
    engine, follower = open_engine(folder, store)
    found = {}
    for place, arm in enumerate(ARMS):
        first = place * chosen.rl_steps
        found[arm] = await learn(
            engine,
            follower,
            open_learner(folder, folder / "run" / "base", seed=seed),
            store,
            read_pages(),
            numbers=range(first, first + chosen.rl_steps),
            seed=seed,
            replays=arm == "replay",
        )
    return found


def run_seeds(chosen: argparse.Namespace) -> list[dict[str, list[StepFigures]]]:
    """Run each seed in a process of its own: an engine's threads do not end."""
    found = []
    for seed in range(chosen.seeds):
        with tempfile.NamedTemporaryFile(suffix=".json") as out:
            sizes = (chosen.layers, chosen.steps, chosen.rl_steps)
            names = ("--layers", "--steps", "--rl-steps")
            given = [text for pair in zip(names, map(str, sizes), strict=True) for text in pair]
            command = [sys.executable, __file__, *given, "--seed", str(seed), "--out", out.name]
            subprocess.run(command, check=True)
            arms = json.loads(Path(out.name).read_text(encoding="utf-8"))
        found.append({arm: [StepFigures(*step) for step in steps] for arm, steps in arms.items()})
    return found


def summarize(seeds: list[dict[str, list[StepFigures]]]) -> dict[str, float]:
    """Means of the arms over seeds and steps."""
    found = {}
    for arm in ARMS:
        values = np.array([seed[arm] for seed in seeds])  # [seeds, steps, figures]
        last = max(1, values.shape[1] // 4)
        found[f"rl_reward_{arm}"] = float(values[:, -last:, 0].mean())
        own = int(arm == "replay")
        found[f"rl_mismatch_p99_{arm}"] = float(values[:, :, 1 + own].mean())
        found[f"rl_mismatch_kl_{arm}"] = float(values[:, :, 3 + own].mean())
    every = np.array([seed[arm] for seed in seeds for arm in ARMS])
    found["rl_p99_ratio"] = float((every[:, :, 1] / every[:, :, 2]).mean())
    found["rl_kl_ratio"] = float(every[:, :, 3].mean() / every[:, :, 4].mean())
    return found


def print_curves(seeds: list[dict[str, list[StepFigures]]]) -> None:
    """Print the means over seeds of each step."""
    names = ("reward", "p99 live", "p99 replayed", "KL live", "KL replayed")
    for arm in ARMS:
        means = np.array([seed[arm] for seed in seeds]).mean(0)
        table = Table("step", *names, title=f"trained with {arm}, {len(seeds)} seeds")
        for step, values in enumerate(means, start=1):
            table.add_row(str(step), *(f"{value:.4g}" for value in values))
        Console().print(table)


def report(title: str, found: dict[str, float]) -> None:
    """Print figures, and merge them into bench/out/moe.json."""
    table = Table("figure", "value", title=title)
    for key, value in found.items():
        table.add_row(key, f"{value:.5g}")
    Console().print(table)
    figures.record("moe", **{key: float(f"{value:.5g}") for key, value in found.items()})


def main() -> None:
    """Measure, print, and merge the figures into bench/out/moe.json."""
    chosen = _arguments()
    if chosen.seed is not None:
        with tempfile.TemporaryDirectory(prefix="etude-moe-") as name:
            arms = asyncio.run(learn_both(chosen, Path(name)))
        Path(chosen.out).write_text(json.dumps(arms), encoding="utf-8")
        os._exit(0)  # the engine's threads would be waited for
    if chosen.only == "ep":
        report("divided experts", compare_ranks())
        return
    began = time.monotonic()
    divided = compare_ranks()
    seeds = run_seeds(chosen)
    found = compare_routing(chosen.layers, chosen.steps) | (summarize(seeds) if seeds else {})
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    found["seconds"] = time.monotonic() - began
    found["cpu_seconds"] = sum(each.ru_utime + each.ru_stime for each in usage)
    if seeds:
        print_curves(seeds)
    report(f"{chosen.layers} layers, {chosen.steps} steps", found | divided)
    sys.stdout.flush()
    os._exit(0)  # the engine's threads would be waited for


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100, help="of training before the version")
    parser.add_argument("--seeds", type=int, default=3, help="of reinforcement; 0 for none")
    parser.add_argument("--rl-steps", type=int, default=20, help="of each arm")
    parser.add_argument("--only", choices=["ep"], help="measure a part alone")
    parser.add_argument("--seed", type=int, help="run this seed alone, and write --out")
    parser.add_argument("--out", help="file for the figures of one seed")
    return parser.parse_args()


if __name__ == "__main__":
    main()

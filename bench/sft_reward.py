"""Cross-entropy of held-out demonstrations after SFT, and the reward after RL from there.

python bench/sft_reward.py [--seeds 3] [--rl-steps 40]

A sweep: a tiny model learns demonstrations for 0 to 160 steps, each time from fresh weights, and
reinforcement learning goes on from each with as many steps. The learner is the real one, with its
phases; rollouts are sampled from its own weights in this process. The task: repeat six digits in
reverse order; the reward is the share of right digits, so that no answer is all or nothing.
  spearman         rank correlation of -cross-entropy and the reward after RL, over all points
  spearman_before  the same with the reward before RL, as the peer: RL may change the order
  spearman_within  mean correlation over the points of one seed, without the spread of seeds
  improved         share of the points whose reward RL raised
The interval is of resampled points, 95 %. 1 means that the lower cross-entropy always wins.

Examples:
  make bench-sft
  python bench/sft_reward.py --seeds 1 --rl-steps 5   a first look
"""

import argparse
import dataclasses
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config

sys.path.insert(0, str(Path(__file__).parents[1]))  # figures are recorded as tests do

from tests.support import figures

from etude.common.api.run.weights import Weights
from etude.common.api.storage import Storage
from etude.common.evaluation.rank_correlation import RankCorrelation, correlate_ranks, spearman
from etude.trainer.learner.batches import PolicyBatch, PolicySequence, SupervisedSequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.learner import Learner

SFT_STEPS = (0, 10, 20, 40, 80, 160)
DIGITS = 6
ASK, ANSWER = 10, 11
"""Tokens before the digits, and between digits and answer."""
PROMPT = DIGITS + 2
DEMONSTRATIONS, HELD_OUT = 32, 256
"""Sequences of one step of SFT, and those that both figures are measured on."""
PROMPTS, SAMPLES = 16, 8
"""Of one step of RL."""
SFT = {
    "name": "sft",
    "type": "SupervisedFineTuning",
    "maxSteps": 100_000,
    "optimizer": {"learningRate": "1e-3", "warmupSteps": 5},
    "data": [{"name": "demonstrations", "uri": "file:///demonstrations.jsonl"}],
}
RL = {
    "name": "rl",
    "type": "ReinforcementLearning",
    "maxSteps": 100_000,
    # With 1e-3 or more, the best starts lose a tenth of their reward within 20 steps.
    "optimizer": {"learningRate": "3e-4", "warmupSteps": 5},
    "tasks": [{"name": "reverse", "uri": "file:///tasks", "environment": "none"}],
    "algorithm": {"name": "DrGRPO", "parameters": {"lossScale": DIGITS}},
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One start of RL."""

    seed: int
    sft_steps: int
    cross_entropy: float
    """Of held-out demonstrations, in nats a token."""
    reward_before: float
    """Of held-out prompts, before RL."""
    reward_after: float
    """Likewise after it."""


def make_learner(folder: Path, seed: int) -> Learner:
    """Make a learner of a tiny model whose weights follow from the seed."""
    model = folder / "model"
    Qwen2Config(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    ).save_pretrained(model)
    return Learner(
        LearnerConfig(
            run="bench",
            holder="bench",
            model_folder=model,
            storage=Storage(uri=folder.as_uri()),
            weights=Weights(dtype="Float32"),
            seed=seed,
            threads=1,
        )
    )


def draw_prompts(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw prompts: the digits between two marks.  [count, PROMPT]."""
    digits = rng.integers(0, 10, (count, DIGITS))
    marks = np.ones((count, 1), np.int64)
    return np.concatenate([ASK * marks, digits, ANSWER * marks], axis=1)


def demonstrate(prompts: np.ndarray) -> list[SupervisedSequence]:
    """Demonstrations of prompts; the answer alone is trained."""
    answers = prompts[:, -2:0:-1]
    weights = np.concatenate([np.zeros(PROMPT, np.float32), np.ones(DIGITS, np.float32)])
    return [
        SupervisedSequence(token_ids=ids.astype(np.int32), weights=weights)
        for ids in np.concatenate([prompts, answers], axis=1)
    ]


@torch.no_grad()
def sample(
    learner: Learner, prompts: np.ndarray, generator: torch.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Sample an answer to each prompt at temperature 1; whole sequences, and log-probs of answers.

    [N, PROMPT] -> [N, PROMPT + DIGITS], [N, DIGITS].
    """
    ids, logprobs = torch.from_numpy(prompts), []
    for _ in range(DIGITS):
        every = learner.policy.model(input_ids=ids).logits[:, -1].float().log_softmax(-1)
        drawn = torch.multinomial(every.exp(), 1, generator=generator)
        logprobs.append(every.gather(1, drawn))
        ids = torch.cat([ids, drawn], dim=1)
    return ids.numpy(), torch.cat(logprobs, dim=1).numpy()


def rewards_of(sequences: np.ndarray) -> np.ndarray:
    """Share of right digits of each sequence.  [N, PROMPT + DIGITS] -> [N]."""
    right: np.ndarray = sequences[:, PROMPT:] == sequences[:, DIGITS:0:-1]
    shares: np.ndarray = right.mean(axis=1)
    return shares


def make_batch(
    learner: Learner, rng: np.random.Generator, generator: torch.Generator
) -> PolicyBatch:
    """Sample one step's groups."""
    prompts = np.repeat(draw_prompts(rng, PROMPTS), SAMPLES, axis=0)
    sequences, logprobs = sample(learner, prompts, generator)
    mask = np.arange(PROMPT + DIGITS) >= PROMPT
    return PolicyBatch(
        sequences=tuple(
            PolicySequence(
                token_ids=ids.astype(np.int32),
                loss_mask=mask,
                sampler_logprobs=np.concatenate([np.zeros(PROMPT), own]).astype(np.float32),
                rollout=rollout,
            )
            for rollout, (ids, own) in enumerate(zip(sequences, logprobs, strict=True))
        ),
        rewards=rewards_of(sequences).astype(np.float64),
        groups=np.repeat(np.arange(PROMPTS), SAMPLES),
        valid=np.ones(len(sequences), dtype=np.bool_),
    )


def measure_point(seed: int, sft_steps: int, *, rl_steps: int) -> Point:
    """Train one point of the sweep."""
    rng, generator = np.random.default_rng([seed, 1]), torch.Generator().manual_seed(seed)
    held_out = draw_prompts(np.random.default_rng(0), HELD_OUT)
    with tempfile.TemporaryDirectory(prefix="etude-sft-") as folder:
        learner = make_learner(Path(folder), seed)
        learner.start_phase(SFT, 0)
        for _ in range(sft_steps):
            learner.supervised_step(demonstrate(draw_prompts(rng, DEMONSTRATIONS)))
        cross_entropy = learner.held_out_loss(demonstrate(held_out))
        before = rewards_of(sample(learner, held_out, generator)[0]).mean()
        learner.start_phase(RL, 0)
        for _ in range(rl_steps):
            learner.policy_step(make_batch(learner, rng, generator))
        after = rewards_of(sample(learner, held_out, generator)[0]).mean()
    return Point(
        seed=seed,
        sft_steps=sft_steps,
        cross_entropy=cross_entropy,
        reward_before=float(before),
        reward_after=float(after),
    )


def correlate(points: list[Point], name: str) -> RankCorrelation:
    """Correlate -cross-entropy with a reward of the points.

    Raises:
        SystemExit: all points are alike.
    """
    found = correlate_ranks(
        [-each.cross_entropy for each in points], [getattr(each, name) for each in points]
    )
    if found is None:
        raise SystemExit(f"{name} is the same at all points")
    return found


def correlate_within(points: list[Point]) -> float:
    """Mean over the seeds of the correlation of one seed's points."""
    by_seed: dict[int, list[Point]] = {}
    for each in points:
        by_seed.setdefault(each.seed, []).append(each)
    found = [
        spearman([-p.cross_entropy for p in own], [p.reward_after for p in own])
        for own in by_seed.values()
    ]
    known = [each for each in found if each is not None]
    return sum(known) / len(known)


def summarise(points: list[Point], started_s: float) -> dict[str, Any]:
    """Figures of the sweep."""
    after, before = (correlate(points, f"reward_{when}") for when in ("after", "before"))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "points": len(points),
        "spearman": after.value,
        "spearman_low": after.low,
        "spearman_high": after.high,
        "spearman_before": before.value,
        "spearman_within": correlate_within(points),
        "improved": sum(p.reward_after > p.reward_before for p in points) / len(points),
        "seconds": time.perf_counter() - started_s,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
    }


def main() -> None:
    """Run the sweep, print its points, and write bench/out/sft_reward.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rl-steps", type=int, default=40)
    chosen = parser.parse_args()
    started_s = time.perf_counter()
    table = Table("seed", "SFT steps", "cross-entropy", "reward before RL", "after")
    points = []
    for seed in range(chosen.seeds):
        for steps in SFT_STEPS:
            point = measure_point(seed, steps, rl_steps=chosen.rl_steps)
            points.append(point)
            values = (point.cross_entropy, point.reward_before, point.reward_after)
            table.add_row(str(seed), str(steps), *(f"{value:.3f}" for value in values))
    found = summarise(points, started_s)
    console = Console()
    console.print(table)
    for name, value in found.items():
        console.print(f"{name:<15}  {value:.3f}")
    rows = [json.dumps(dataclasses.asdict(each)) for each in points]
    figures.record("sft_reward", **{k: round(v, 4) for k, v in found.items()}, sweep=rows)


if __name__ == "__main__":
    main()

"""Multi-token prediction: guesses that the engine accepts, and the speed of rollouts with them.

python bench/mtp.py [--layers 6] [--width 256] [--steps 100]

A small Qwen2 model of bytes learns the project's own pages, on the CPU. Then it gets a head, which
learns by self-distillation in as many steps. The real engine samples the same prompts with the
head's guesses and, as the peer, without, in processes of their own: with, without, without, with;
16 rollouts at a time, then one, as when a step waits for its last rollout.
  acceptance     guessed tokens that were accepted, at the temperature of rollouts (1)
  speedup        tokens a second with guesses over those without, at temperature 1
  speedup_alone  the same for one rollout at a time
  identical      completions at temperature 0 that are the peer's, token for token

Examples:
  make bench-mtp
  python bench/mtp.py --steps 20   a first look
  python bench/mtp.py --layers 12 --width 512   where reading weights costs more than the rest
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prometheus_client import REGISTRY
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Qwen2Config

sys.path.insert(0, str(Path(__file__).parents[1]))  # figures are recorded as tests do

from tests.support import figures

from etude.common.api.run.engine_settings import EngineSettings
from etude.common.api.run.weights import Weights
from etude.common.api.storage import Storage
from etude.common.model_sources.mtp_head import add_mtp_head
from etude.inference.engine.interface import SampleRequest
from etude.inference.settings import EngineOptions
from etude.trainer.learner.batches import SupervisedSequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.learner import Learner

ROOT = Path(__file__).parents[1]

VOCABULARY, CONTEXT = 320, 512
SEQUENCES, LENGTH = 16, 128
"""Of one step."""
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 48, 64, 96
CONCURRENT, ALONE_PROMPTS = 16, 12
ORDER = (1, 0, 0, 1)
CASES = {
    "sampled": (1.0, False),
    "greedy": (0.0, False),
    "alone": (1.0, True),
    "greedy_alone": (0.0, True),
}
"""Temperature, and True for one rollout at a time."""
PHASE = {
    "name": "bench",
    "type": "SupervisedFineTuning",
    "maxSteps": 100_000,
    "optimizer": {"learningRate": "2e-3", "warmupSteps": 10},
    "data": [{"name": "pages", "uri": "file:///pages.jsonl"}],
}


def read_pages() -> np.ndarray:
    """Bytes of the project's pages, one behind the other."""
    texts = [path.read_bytes() for path in sorted((ROOT / "docs").rglob("*.md"))]
    return np.frombuffer(b"\n\n".join(texts), np.uint8).astype(np.int32)


def write_config(folder: Path, *, layers: int, width: int) -> None:
    """Write a model's configuration, and a tokenizer of bytes."""
    Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    ).save_pretrained(folder)
    alphabet = {byte: place for place, byte in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    Tokenizer(models.BPE(vocab=alphabet, merges=[])).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def train(model: Path, export: Path, *, steps: int, seed: int, mtp: bool) -> dict[str, float]:
    """Train a model on the pages, and export it; figures of the last step."""
    storage, weights = Storage(uri=export.parent.as_uri()), Weights(dtype="Float32")
    config = LearnerConfig(
        run="bench", holder="bench", model_folder=model, storage=storage, weights=weights, threads=2
    )
    learner = Learner(config)
    learner.start_phase(PHASE | ({"mtp": {"lossWeight": "1"}} if mtp else {}), 0)
    pages, rng = read_pages(), np.random.default_rng(seed)
    last: dict[str, float] = {}
    for _ in range(steps):
        starts = rng.integers(0, pages.size - LENGTH, SEQUENCES)
        batch = [
            SupervisedSequence(token_ids=pages[s : s + LENGTH], weights=np.ones(LENGTH, np.float32))
            for s in starts
        ]
        result = learner.supervised_step(batch)
        last = {"loss": result.loss, **result.extra}
    learner.export(export.name)
    return last


def sample(folder: Path, guesses: int) -> dict[str, Any]:
    """Sample all prompts at temperatures 1 and 0 in this process."""
    options = EngineOptions(
        model=folder,
        served_name="bench",
        dtype="float32",
        max_model_len=CONTEXT,
        max_concurrent=CONCURRENT,
        kv_cache_bytes=128 << 20,
        gpus=0,
        follows_store=False,
        threads=1,
        engine=EngineSettings(speculative_tokens=guesses),
    )
    os.environ.update(options.environment())
    torch._dynamo.config.disable = True
    from etude.inference.engine import replica  # noqa: PLC0415 - reads the environment

    engine = replica.build_replica(options)
    return asyncio.run(sample_all(engine))


async def sample_all(engine: Any) -> dict[str, Any]:  # noqa: ANN401 - its module imports vLLM
    """Sample 16 at a time, then one at a time; tokens, seconds, CPU-seconds and counts."""
    pages = read_pages()
    starts = np.linspace(0, pages.size - PROMPT_TOKENS, PROMPTS).astype(int)

    async def complete(number: int, temperature: float) -> list[int]:
        prompt = pages[starts[number] : starts[number] + PROMPT_TOKENS].tolist()
        request = SampleRequest(
            request_id=f"{time.perf_counter_ns()}",
            prompt_token_ids=prompt,
            max_tokens=ANSWER_TOKENS,
            temperature=temperature,
            seed=number if temperature else None,
        )
        return [t async for piece in engine.generate(request) for t in piece.token_ids]

    async def complete_all(temperature: float, *, alone: bool) -> list[list[int]]:
        places = asyncio.Semaphore(1 if alone else CONCURRENT)

        async def wait_and_complete(number: int) -> list[int]:
            async with places:
                return await complete(number, temperature)

        numbers = range(ALONE_PROMPTS if alone else PROMPTS)
        return await asyncio.gather(*map(wait_and_complete, numbers))

    def count(kind: str) -> float:
        name = f"vllm:spec_decode_num_{kind}_tokens_total"
        return sum(s.value for f in REGISTRY.collect() for s in f.samples if s.name == name)

    found: dict[str, Any] = {}
    await complete(0, 0.5)  # the first request is slower than others
    for key, (temperature, alone) in CASES.items():
        before = (count("draft"), count("accepted"))
        started, cpu = time.perf_counter(), used_cpu()
        done = await complete_all(temperature, alone=alone)
        seconds, cpu = time.perf_counter() - started, used_cpu() - cpu
        found[key] = {
            "tokens": done,
            "seconds": seconds,
            "cpu": cpu,
            "drafted": count("draft") - before[0],
            "accepted": count("accepted") - before[1],
        }
    return found


def used_cpu() -> float:
    """CPU-seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run_engines(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Sample in one process after the other."""
    for guesses in ORDER:
        done = subprocess.run(
            [sys.executable, __file__, "--sample", str(folder), "--guesses", str(guesses)],
            stdout=subprocess.PIPE,
            check=True,
            timeout=900,
        )
        yield guesses, json.loads(done.stdout.splitlines()[-1])


def summarise(runs: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, float]:
    """Figures over all runs of both ways."""

    def total(guesses: int, case: str, key: str) -> float:
        return sum(float(found[case][key]) for each, found in runs if each == guesses)

    def ratio(case: str, key: str) -> float:
        return total(0, case, key) / total(1, case, key)

    tokens = PROMPTS * ANSWER_TOKENS * len(ORDER) / 2
    greedy = {
        guesses: found["greedy"]["tokens"] + found["greedy_alone"]["tokens"]
        for guesses, found in runs
    }
    same = [a == b for a, b in zip(greedy[1], greedy[0], strict=True)]
    return {
        "acceptance": total(1, "sampled", "accepted") / total(1, "sampled", "drafted"),
        "acceptance_greedy": total(1, "greedy", "accepted") / total(1, "greedy", "drafted"),
        "speedup": ratio("sampled", "seconds"),
        "speedup_greedy": ratio("greedy", "seconds"),
        "speedup_alone": ratio("alone", "seconds"),
        "speedup_greedy_alone": ratio("greedy_alone", "seconds"),
        "cpu_ratio": ratio("sampled", "cpu"),
        "cpu_ratio_alone": ratio("alone", "cpu"),
        "tokens_per_s_with": tokens / total(1, "sampled", "seconds"),
        "tokens_per_s_without": tokens / total(0, "sampled", "seconds"),
        "identical_greedy": sum(same) / len(same),
    }


def main() -> None:
    """Train, sample, print, and write bench/out/mtp.json.

    Raises:
        SystemExit: a completion at temperature 0 differs.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256, help="a multiple of 128")
    parser.add_argument("--steps", type=int, default=100, help="of the model, and of the head")
    parser.add_argument("--sample", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--guesses", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.sample is not None:
        print(json.dumps(sample(chosen.sample, chosen.guesses)), flush=True)
        os._exit(0)
    with tempfile.TemporaryDirectory(prefix="etude-mtp-") as name:
        folder = Path(name)
        write_config(folder / "random", layers=chosen.layers, width=chosen.width)
        train(folder / "random", folder / "model", steps=chosen.steps, seed=0, mtp=False)
        add_mtp_head(folder / "model", folder / "headed")
        trained = train(folder / "headed", folder / "final", steps=chosen.steps, seed=1, mtp=True)
        found = summarise(list(run_engines(folder / "final")))
    found |= {key: trained[key] for key in ("loss", "mtp_kl", "mtp_agreement")}
    table = Table(
        "figure",
        "value",
        title=f"{chosen.layers} layers, width {chosen.width}, {chosen.steps} steps",
    )
    for key, value in found.items():
        table.add_row(key, f"{value:.3f}")
    Console().print(table)
    figures.record("mtp", **{key: round(value, 4) for key, value in found.items()})
    if found["identical_greedy"] < 1:
        raise SystemExit("completions at temperature 0 differ from those without guesses")


if __name__ == "__main__":
    main()

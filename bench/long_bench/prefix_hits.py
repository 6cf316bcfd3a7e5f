"""Prefix-cache hits of the real engine across summaries, against the tokens that prompts share.

Each prompt of a rollout of many contexts goes to a small random model on the engine; what it
answers is left out, and a script's turn stands in its place. So the next prompt has tokens that
the engine did not sample, and a hit is of what it has read before.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from prometheus_client import REGISTRY
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig
from typing_extensions import override

from etude.agent.chat import ChatFormat
from etude.agent.completions import Completion, FinishReason
from etude.agent.local import INITIAL, LocalEnvironment
from etude.agent.rollout import run_rollout
from etude.agent.summaries import TOOL_NAME, SummarizeContext, SummaryLimits
from etude.agent.token_policy import RolloutLimits, RolloutTask, Sampler
from etude.agent.toolsets import toolset
from etude.agent.trajectory import PolicySpan
from etude.agent.workspace import ExecResult, MemoryWorkspace
from etude.inference.engine.interface import SampleRequest
from etude.inference.settings import EngineOptions
from long_bench.script import FILE, write_file, write_turn

CONTEXT, TURNS, FILE_TOKENS = 16_384, 48, 600
TURN_TOKENS, SUMMARY_TOKENS = 1_024, 1_024
KV_BYTES = 256 << 20
"""Room for the tokens of all contexts: nothing is evicted."""
BLOCK = 32
"""Tokens of a block of the engine on CPUs, which shares whole ones."""
LEAST_SHARE = 0.95
"""Goal: hits over the tokens that prompts share with earlier ones, in whole blocks."""


class Prompt(NamedTuple):
    """One prompt at the engine."""

    is_first: bool
    """True if it opens a context after a summary."""
    tokens: int
    shared: int
    """Tokens with which an earlier prompt begins, too."""
    queried: float
    hits: float
    """Tokens by the engine's own counters."""


@dataclass(slots=True)
class ReadingSampler(Sampler):
    """Lets the engine read each prompt, and goes on with a script."""

    engine: Any
    """A Replica: its module reads the environment when it is imported."""
    chat: ChatFormat
    prompts: list[Prompt] = field(default_factory=list)
    _known: list[tuple[int, ...]] = field(default_factory=list)
    """The first and the last prompt of all contexts so far."""

    @override
    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int | None
    ) -> Completion:
        ids = tuple(prompt_ids)
        shared = max((_count_shared(ids, each) for each in self._known), default=0)
        is_first = bool(self._known) and shared < len(self._known[-1])
        before = _read_counters()
        request = SampleRequest(
            request_id=f"prompt-{len(self.prompts)}",
            prompt_token_ids=ids,
            max_tokens=1,
            temperature=1.0,
        )
        async for _ in self.engine.generate(request):
            pass
        queried, hits = (now - then for now, then in zip(_read_counters(), before, strict=True))
        self.prompts.append(Prompt(is_first, len(ids), shared, queried, hits))
        if is_first or not self._known:
            self._known.append(ids)
        self._known[-1] = ids if len(ids) > len(self._known[-1]) else self._known[-1]
        turn = write_turn(self.chat, len(self.prompts))
        span = PolicySpan(0, len(turn), INITIAL, INITIAL)
        return Completion(turn, [-0.5] * len(turn), [span], FinishReason.STOP)


def compare(model: Path) -> dict[str, float]:
    """Compare hits with shared tokens; print both, and return the figures."""
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as name:
        prompts = asyncio.run(_measure(Path(name), ChatFormat.load(model)))
    groups = {"all": prompts, "after a summary": [each for each in prompts if each.is_first]}
    table = Table("prompts", "number", "tokens", "bound", "in whole blocks", "hit rate", "of bound")
    found: dict[str, float] = {}
    for name, group in groups.items():
        tokens = sum(each.tokens for each in group)
        bound = sum(each.shared for each in group) / tokens
        blocks = sum(each.shared // BLOCK * BLOCK for each in group) / tokens
        rate = sum(each.hits for each in group) / sum(each.queried for each in group)
        cells = [f"{value:.4f}" for value in (bound, blocks, rate, rate / blocks)]
        table.add_row(name, str(len(group)), f"{tokens:,}", *cells)
        key = "prefix" if name == "all" else "prefix_first"
        found |= {
            f"{key}_prompts": len(group),
            f"{key}_bound": round(bound, 4),
            f"{key}_hit_rate": round(rate, 4),
            f"{key}_hits_of_bound": round(rate / blocks, 4),
        }
    console = Console()
    console.print(table)
    console.print(
        "Bound: tokens with which an earlier prompt begins, too, over all. Hits by the counters of"
        " vLLM, for a small random model; turns are a script's."
    )
    return found


def is_shared(found: Mapping[str, float]) -> bool:
    """True if the figures meet the goal."""
    return min(found["prefix_hits_of_bound"], found["prefix_first_hits_of_bound"]) >= LEAST_SHARE


async def _measure(folder: Path, chat: ChatFormat) -> list[Prompt]:
    sampler = ReadingSampler(await _build_engine(folder, chat), chat)
    tools = toolset("Standard").with_tool(TOOL_NAME, SummarizeContext)
    files = MemoryWorkspace({FILE: write_file(chat, FILE_TOKENS).encode()}, _refuse)
    await run_rollout(
        sampler,
        LocalEnvironment(tools, files),
        chat,
        tools,
        RolloutLimits(
            max_turns=TURNS,
            max_turn_tokens=TURN_TOKENS,
            max_tokens=TURNS * CONTEXT,
            timeout_s=3_600,
            summaries=SummaryLimits(context_tokens=CONTEXT, max_tokens=SUMMARY_TOKENS),
        ),
        RolloutTask(instruction="Find out why the service is slow."),
    )
    return sampler.prompts


async def _build_engine(folder: Path, chat: ChatFormat) -> Any:  # noqa: ANN401 - its module imports vLLM
    config = LlamaConfig(
        vocab_size=chat.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(chat.vocabulary.folder / name, folder / name)
    options = EngineOptions(
        model=folder,
        served_name="bench",
        dtype="float32",
        max_model_len=CONTEXT,
        max_concurrent=1,
        kv_cache_bytes=KV_BYTES,
        gpus=0,
        follows_store=False,
        threads=1,
    )
    os.environ.update(options.environment())
    torch._dynamo.config.disable = True
    from etude.inference.engine import replica  # noqa: PLC0415 - reads the environment

    engine = replica.build_replica(options)
    await engine.relabel(INITIAL, drop_cache=False)
    return engine


def _read_counters() -> tuple[float, float]:
    """Tokens that were looked up in the prefix cache, and those that were in it."""
    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    queried, hits = (sum(s.value for s in samples if s.name == name) for name in names)
    return queried, hits


def _count_shared(one: Sequence[int], two: Sequence[int]) -> int:
    pairs = enumerate(zip(one, two, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(two)))


async def _refuse(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError(command)

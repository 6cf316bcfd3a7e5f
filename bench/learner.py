"""The learner's step: equal gradients in every form, and memory by token of its parts.

python bench/learner.py [--layers 30] [--tokens 512]

A random model of SmolLM2-135M's shape on the CPU, planned steps of the examples' models, and
two or four ranks over gloo. Memory is what the passes allocate beside the weight and its gradient,
counted by torch's profiler and not by the operating system.
"""

import argparse
import functools
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from learner_bench import collectives, planned, rank_gradients
from learner_bench.figures import merge_figures
from learner_bench.random_model import HIDDEN, VOCABULARY, batch, build, gradient

from etude.trainer.model.activation_checkpointing import Checkpointing, checkpoint_blocks
from etude.trainer.model.logit_probe import backbone
from etude.trainer.model.output_head import score_tokens
from etude.trainer.model.policy import Policy

LONG = {
    "learnerRanks": 8,
    "gpusPerReplica": 8,
    "mesh": {"shard": 4, "context": 2},
    "microBatchTokens": 131_072,
}
"""Rows of 128k tokens on eight GPUs, each shared by two of them."""


def peak_bytes(run: Callable[[], object]) -> int:
    """Largest sum of live allocations during a call."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    # Each event is one allocation, or one release with a negative size.
    changes = [
        e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"
    ]
    return max(itertools.accumulate(changes), default=0)


def head_peak(num_tokens: int, *, chunked: bool) -> int:
    """Peak of one forward and backward pass of the output head."""
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, HIDDEN, generator=make).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=make).requires_grad_()
    ids = torch.randint(0, VOCABULARY, (num_tokens,), generator=make)

    def run() -> None:
        if chunked:
            logprobs = score_tokens(hidden, ids, weight=weight, chunk_logits=1 << 22).logprobs
        else:
            every = (hidden @ weight.t()).log_softmax(dim=-1)
            logprobs = every.gather(1, ids[:, None])[:, 0]
        logprobs.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    return peak_bytes(run)


def blocks_peak(policy: Policy, num_tokens: int) -> int:
    """Peak of one forward and backward pass of all blocks, without embedding and head."""
    policy.model.get_input_embeddings().requires_grad_(requires_grad=False)
    for parameter in policy.parameters():
        # Sums of gradients are there before and after: only what depends on tokens is counted.
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    token_ids = torch.arange(num_tokens)[None]

    def run() -> None:
        output = backbone(policy.model)(input_ids=token_ids, use_cache=False)
        output.last_hidden_state.sum().backward()

    return peak_bytes(run)


def slope(peak: Callable[[int], int], few: int = 256, many: int = 512) -> float:
    """Bytes that each further token adds."""
    return (peak(many) - peak(few)) / (many - few)


def main() -> None:
    """Measure, print the table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = batch(options.tokens)
    with tempfile.TemporaryDirectory() as folder:
        plain = gradient(build(Path(folder), options.layers), rows, packed=False)
        packed = gradient(build(Path(folder), options.layers), rows, packed=True)
        policy = build(Path(folder), options.layers)
        checkpoint_blocks(policy.model, Checkpointing.BLOCKS)
        checkpointed = gradient(policy, rows, packed=False)
        blocks = {
            "blocks_bytes_per_token_before": slope(
                functools.partial(blocks_peak, build(Path(folder), options.layers))
            ),
            "blocks_bytes_per_token": slope(functools.partial(blocks_peak, policy)),
        }
    head = {
        "head_bytes_per_token_before": slope(functools.partial(head_peak, chunked=False)),
        "head_bytes_per_token": slope(functools.partial(head_peak, chunked=True)),
    }
    figures = {
        "grad_diff_packed": float((packed - plain).abs().max()),
        "grad_diff_checkpointed": float((checkpointed - plain).abs().max()),
        **rank_gradients.compare_ranks(options.layers, options.tokens),
        **head,
        **blocks,
        "plan_over_measured": planned.plan_over_measured(options.tokens, peak_bytes),
        "peak_gib_7b_128k": planned.peak_gib("qwen2.5-7b", "qwen2.5-7b", LONG),
        "peak_gib_32b": planned.peak_gib("qwen-32b", "qwen3-32b"),
        "peak_gib_30b_a3b": planned.peak_gib("qwen3-30b-a3b", "qwen3-30b-a3b"),
        **collectives.count_collectives(),
    }
    merge_figures(figures)
    sys.stdout.write("".join(f"{name:30} {value:14.6g}\n" for name, value in figures.items()))


if __name__ == "__main__":
    main()

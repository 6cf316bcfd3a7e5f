"""A rollout of a million tokens over many contexts, from the turn loop to microbatches.

python bench/long_rollouts.py [--worker | --context-parallel | --prefix-hits]
    [--tokens 1000000] [--turns 300] [--context 32768]

One rollout reads a long file in each turn, and sums its context up whenever that is full. Sampler
and files are in this process; turn loop, summaries, message, check, journal and its recovery, and
microbatches are those of a run. Memory is what the process has more than at its start, for each
token of all contexts; an id, a log-prob and a mask have 9 bytes. The CPU time of turns is compared
between the first and the last tenth: in a loop without work for each earlier token it is the same.
--worker does it by a rollout worker's process, with a sandbox, a store and RPC; the peer is one of
a tenth. --context-parallel trains a row of 64 k tokens on two ranks, the peer is one rank.
--prefix-hits counts what the real engine finds in its prefix cache, against what prompts share.

Examples:
  make bench-long-rollouts
  python bench/long_rollouts.py --tokens 100000 --turns 60   a short one
"""

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parents[1]))  # figures are recorded as tests do

from long_bench import learner_side, shared_rows, worker_rollout
from long_bench.script import FILE, SAMPLED_TOKENS, write_file, write_turn
from tests.support import figures

from etude.agent.chat import ChatFormat
from etude.agent.completions import Completion, FinishReason
from etude.agent.local import INITIAL, LocalEnvironment
from etude.agent.rollout import run_rollout
from etude.agent.rollout_message import to_rollout_message
from etude.agent.summaries import TOOL_NAME, SummarizeContext, SummaryLimits
from etude.agent.token_policy import RolloutLimits, RolloutTask, Sampler
from etude.agent.toolsets import toolset
from etude.agent.trajectory import PolicySpan, Trajectory
from etude.agent.workspace import ExecResult, MemoryWorkspace
from etude.common.blobs import open_store
from etude.trainer.controller.journal.write_ahead_log import Journal, recover_records
from etude.v1 import journal_pb2, rewards_pb2, rollout_pb2

T = TypeVar("T")
MODEL = Path(__file__).parents[1] / "tests/unit/agent/model"
TURN_TOKENS, SUMMARY_TOKENS = 1_024, 1_024
WIRE_BYTES = 9
MOST_BYTES, MOST_GROWTH = 20 * WIRE_BYTES, 1.5
"""Goals: memory for each token, with the copies of all stages; CPU of late turns over early."""


class Stage(NamedTuple):
    """Cost of one stage."""

    name: str
    wall_s: float
    cpu_s: float
    rss_bytes: int
    """Memory of the process afterwards, above that of its start."""


def main() -> None:
    """Run all stages, print them, and record the figures.

    Raises:
        SystemExit: with 1 if a goal is missed.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--context", type=int, default=32_768)
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--worker", action="store_true", help="a worker's process, and a sandbox")
    parts.add_argument("--context-parallel", action="store_true", help="two ranks share 64 k")
    parts.add_argument("--prefix-hits", action="store_true", help="counters of the real engine")
    given = parser.parse_args()
    is_met = _measure_part(given)
    sys.stdout.flush()
    if given.prefix_hits:
        os._exit(0 if is_met else 1)  # the engine's threads would be waited for
    raise SystemExit(0 if is_met else 1)


def _measure_part(given: argparse.Namespace) -> bool:
    """Measure what was asked for, and record it; true if it meets the goals."""
    if given.worker:
        found = worker_rollout.compare(
            MODEL, tokens=given.tokens, turns=given.turns, context=given.context
        )
        is_met = worker_rollout.is_flat(found)
    elif given.context_parallel:
        found = shared_rows.compare()
        is_met = shared_rows.is_equal(found)
    elif given.prefix_hits:
        from long_bench import prefix_hits  # noqa: PLC0415 - others need no engine

        found = prefix_hits.compare(MODEL)
        is_met = prefix_hits.is_shared(found)
    else:
        run = LongRollout(tokens=given.tokens, turns=given.turns, context=given.context)
        run.measure()
        found = run.report()
        is_met = (
            found["bytes_per_token"] <= MOST_BYTES
            and found["turn_cpu_growth"] <= MOST_GROWTH
            and not found["links_over_context"]
        )
    figures.record("long_rollouts", **found)
    return is_met


@dataclass(slots=True)
class FixedSampler(Sampler):
    """Samples turns of one length, and notes the CPU time between two of them."""

    chat: ChatFormat
    turn_cpu_s: list[float] = field(default_factory=list)
    _last_s: float = 0.0

    @override
    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int | None
    ) -> Completion:
        now_s = time.process_time()
        self.turn_cpu_s.append(now_s - self._last_s)
        ids = write_turn(self.chat, len(self.turn_cpu_s))
        version = INITIAL
        span = PolicySpan(0, len(ids), version, version)
        self._last_s = time.process_time()
        return Completion(ids, [-0.5] * len(ids), [span], FinishReason.STOP)


@dataclass(slots=True, kw_only=True)
class LongRollout:
    """The stages of one rollout, in their order."""

    tokens: int
    turns: int
    context: int
    stages: list[Stage] = field(default_factory=list)
    sampler: FixedSampler = field(default_factory=lambda: FixedSampler(ChatFormat.load(MODEL)))
    links: list[int] = field(default_factory=list)
    """Tokens of each context."""
    shared_tokens: int = 0
    """Tokens with which a context begins like the one before it, on the mean."""
    _start_bytes: int = 0

    def measure(self) -> None:
        """Run all stages."""
        self._start_bytes = read_rss()
        trajectory = self._time("turn loop", self._run_loop)
        self.links = [len(link.token_ids) for link in trajectory.links]
        self.shared_tokens = count_shared([link.token_ids for link in trajectory.links])
        rollout = self._time("message", partial(self._write_message, trajectory))
        del trajectory
        self._time("check", partial(self._check, rollout))
        with tempfile.TemporaryDirectory(prefix="etude-bench-") as name:
            uri = Path(name).as_uri()
            self._time("journal", partial(self._write_record, uri, rollout))
            del rollout
            read = self._time("recovery", partial(read_record, uri))
        self._time("microbatches", partial(self._pack, read))

    def _run_loop(self) -> Trajectory:
        return asyncio.run(self._roll_out())

    async def _roll_out(self) -> Trajectory:
        chat = self.sampler.chat
        tools = toolset("Standard").with_tool(TOOL_NAME, SummarizeContext)
        read = max(1, self.tokens // self.turns - SAMPLED_TOKENS)
        text = write_file(chat, read)
        return await run_rollout(
            self.sampler,
            LocalEnvironment(tools, MemoryWorkspace({FILE: text.encode()}, refuse)),
            chat,
            tools,
            RolloutLimits(
                max_turns=self.turns,
                max_turn_tokens=TURN_TOKENS,
                max_tokens=2 * self.tokens,
                timeout_s=3_600,
                summaries=SummaryLimits(context_tokens=self.context, max_tokens=SUMMARY_TOKENS),
            ),
            RolloutTask(instruction="Find out why the service is slow."),
        )

    def _write_message(self, trajectory: Trajectory) -> rollout_pb2.Rollout:
        rollout = to_rollout_message(trajectory)
        rollout.rollout_id, rollout.group_id = "long-0", "long"
        return rollout

    def _write_record(self, uri: str, rollout: rollout_pb2.Rollout) -> None:
        asyncio.run(write_record(uri, rollout))

    def _check(self, rollout: rollout_pb2.Rollout) -> None:
        learner_side.check(rollout, vocab_size=self.sampler.chat.vocab_size, context=self.context)

    def _pack(self, rollout: rollout_pb2.Rollout) -> None:
        learner_side.pack(rollout, tokens=self.tokens, context=self.context)

    def _time(self, name: str, work: Callable[[], T]) -> T:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        done = work()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        self.stages.append(Stage(name, wall_s, cpu_s, read_rss() - self._start_bytes))
        return done

    def report(self) -> dict[str, float]:
        """Print the stages; returns the figures."""
        total = sum(self.links)
        table = Table("stage", "wall s", "CPU s", "MiB more", "bytes a token")
        for name, wall_s, cpu_s, rss in self.stages:
            row = (f"{wall_s:.2f}", f"{cpu_s:.2f}", f"{rss / 2**20:.0f}", f"{rss / total:.0f}")
            table.add_row(name, *row)
        tenth = max(1, self.turns // 10)
        turns = self.sampler.turn_cpu_s[1:]
        growth = float(np.median(turns[-tenth:]) / np.median(turns[:tenth]))
        console = Console()
        console.print(table)
        console.print(
            f"{total:,} tokens in {len(self.links)} contexts of at most {max(self.links):,};"
            f" {self.shared_tokens:,} tokens of each are those of the context before.\n"
            f"CPU of a turn, last tenth over first: {growth:.2f}."
            f" A token on the wire has {WIRE_BYTES} bytes."
        )
        return {
            "tokens": total,
            "turns": self.turns,
            "contexts": len(self.links),
            "links_over_context": sum(each > self.context for each in self.links),
            "bytes_per_token": max(stage.rss_bytes for stage in self.stages) / total,
            "turn_cpu_growth": growth,
            "shared_prefix_tokens": self.shared_tokens,
            "cpu_seconds": sum(stage.cpu_s for stage in self.stages),
        }


async def refuse(command: str, timeout_s: float) -> ExecResult:
    """Fail: no turn runs a command.

    Raises:
        AssertionError: always.
    """
    raise AssertionError(command)


async def write_record(uri: str, rollout: rollout_pb2.Rollout) -> None:
    """Write the rollout as the controller does, until it is durable."""
    journal = Journal(open_store(uri), "bench", 1, 1)
    writing = asyncio.create_task(journal.run(), name="journal")
    opening = journal_pb2.JournalOpen(run_uid="bench", epoch=1)
    journal.append(journal_pb2.JournalRecord(open=opening))
    reward = rewards_pb2.RewardRecord(rollout_id=rollout.rollout_id, reward=1.0)
    body = journal_pb2.JournalRollout(rollout=rollout, reward=reward)
    journal.append(journal_pb2.JournalRecord(rollout=body))
    await journal.wait_durable(journal.last_sequence)
    writing.cancel()
    await asyncio.wait([writing])


def read_record(uri: str) -> rollout_pb2.Rollout:
    """Read the rollout as a resumed controller does."""
    records = recover_records(open_store(uri), run_uid="bench", before_epoch=2, since=1).records
    return next(each.rollout.rollout for each in records if each.HasField("rollout"))


def count_shared(contexts: Sequence[Sequence[int]]) -> int:
    """Mean number of tokens with which a context begins like the one before it."""
    shared = [
        next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), len(two))
        for one, two in itertools.pairwise(contexts)
    ]
    return round(sum(shared) / max(1, len(shared)))


def read_rss() -> int:
    """Memory of this process, in bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


if __name__ == "__main__":
    main()

"""A long rollout through a worker's process, its log on a store, and real calls in a sandbox.

The policy is a script behind the engine's RPC, the reward is always 1, and the record comes by a
pipe where a run has Ray; its tokens come by the store, as in a run.
"""

import asyncio
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from environment_bench.pool import Pool
from rich.console import Console
from rich.table import Table

from etude.agent.chat import ChatFormat
from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.common.api.storage import Storage
from etude.common.blobs import open_store
from etude.trainer.contents.objects import restore_rollouts
from etude.trainer.rollouts.protocol import GroupRequest, WorkerConfig
from etude.trainer.routing.table import EngineState, RoutingTable
from etude.v1 import journal_pb2, rollout_pb2
from long_bench import learner_side, services
from long_bench.script import FILE, SAMPLED_TOKENS, write_file

PROGRAM = Path(__file__).with_name("worker_process.py")
MOST_TOKENS = 1_048_576
"""Most that the API takes for a rollout."""
ENVIRONMENT = "repos"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a rollout."""

    tokens: int
    turns: int
    context: int
    turn_tokens: int = 1_024
    summary_tokens: int = 1_024

    @property
    def file_tokens(self) -> int:
        """Tokens of the file that each turn reads."""
        return max(1, self.tokens // self.turns - SAMPLED_TOKENS)

    def limits(self) -> RolloutPolicy:
        """Limits of the rollout, as a run has them."""
        summaries = {"contextTokens": self.context, "maxTokens": self.summary_tokens}
        return RolloutPolicy.model_validate(
            {
                "maxTurns": self.turns,
                "maxTurnTokens": self.turn_tokens,
                "maxTokens": MOST_TOKENS,
                "timeoutSeconds": 3_600,
                "summaries": summaries,
                "retries": 0,
            }
        )


MOST_WORKER_BYTES, MOST_GROWTH = 180, 1.5
"""Goals: memory of a worker for each further token; its CPU in late turns over early."""


class WorkerRun(NamedTuple):
    """A rollout through a worker, and its way to the learner."""

    tokens: int
    """Of all contexts."""
    transcript_tokens: int
    """Without those that a context repeats."""
    calls: int
    contexts: int
    trained_tokens: int
    start_bytes: float
    """Memory of the worker before the group."""
    peak_bytes: float
    wall_s: float
    cpu_s: float
    """Of the worker."""
    growth: float
    """CPU of the worker in the last tenth of its turns over that in the first."""
    record_bytes: int
    """Through the controller."""
    stored_bytes: int
    """Through the store."""
    log_bytes: int
    """Of the worker's log in the store, where it is largest."""


def compare(model: Path, *, tokens: int, turns: int, context: int) -> dict[str, float]:
    """Compare a rollout with one of a tenth of its tokens; print both, and return the figures."""
    runs = [
        measure(model, Shape(tokens=tokens // part, turns=turns // part, context=context))
        for part in (10, 1)
    ]
    table = Table("tokens", "calls", "contexts", "peak MiB", "CPU s", "wall s", "late / early")
    for run in runs:
        table.add_row(
            f"{run.tokens:,}",
            str(run.calls),
            str(run.contexts),
            f"{run.peak_bytes / 2**20:.0f}",
            f"{run.cpu_s:.1f}",
            f"{run.wall_s:.1f}",
            f"{run.growth:.2f}",
        )
    short, long = runs
    more_bytes = (long.peak_bytes - short.peak_bytes) / (long.tokens - short.tokens)
    console = Console()
    console.print(table)
    console.print(
        f"Peak over that of a tenth: {long.peak_bytes / short.peak_bytes:.2f}, {more_bytes:.0f}"
        f" bytes for each further token; on the wire it has {long.stored_bytes / long.tokens:.1f},"
        f" by the store: {long.record_bytes:,} bytes go through the controller.\n"
        f"The log in the store had {long.log_bytes / 2**20:.1f} MiB where it was largest."
        f" {long.trained_tokens:,} tokens were packed to be trained.\n"
        "Sampled by a script behind the engine's RPC; calls ran in a sandbox (driver Process)."
    )
    return {
        "worker_tokens": long.tokens,
        "worker_transcript_tokens": long.transcript_tokens,
        "worker_calls": long.calls,
        "worker_contexts": long.contexts,
        "worker_trained_tokens": long.trained_tokens,
        "worker_peak_mib": round(long.peak_bytes / 2**20, 1),
        "worker_peak_ratio": round(long.peak_bytes / short.peak_bytes, 3),
        "worker_bytes_per_token": round(more_bytes, 1),
        "worker_turn_cpu_growth": round(long.growth, 3),
        "worker_record_bytes": long.record_bytes,
        "worker_stored_bytes": long.stored_bytes,
        "worker_log_bytes": long.log_bytes,
        "worker_cpu_seconds": round(long.cpu_s, 2),
        "worker_seconds": round(long.wall_s, 2),
    }


def is_flat(found: Mapping[str, float]) -> bool:
    """True if the figures meet the goals."""
    return (
        found["worker_bytes_per_token"] <= MOST_WORKER_BYTES
        and found["worker_turn_cpu_growth"] <= MOST_GROWTH
    )


def measure(model: Path, shape: Shape) -> WorkerRun:
    """Run a rollout of a shape, and pack it.

    Raises:
        RuntimeError: the rollout failed.
    """
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as name:
        return asyncio.run(_measure(Path(name), model, shape))


async def _measure(folder: Path, model: Path, shape: Shape) -> WorkerRun:
    chat = ChatFormat.load(model)
    task = _write_task(folder, write_file(chat, shape.file_tokens))
    (folder / "pool").mkdir()
    pool = Pool(folder=folder / "pool", image=None, slots=2)
    engine = services.ScriptedEngine(chat)
    try:
        await pool.start()
        async with services.serve(engine) as target:
            config = WorkerConfig(
                run="bench",
                model_folder=model,
                brokers={ENVIRONMENT: f"127.0.0.1:{pool.ports['broker']}"},
                templates={ENVIRONMENT: "t"},
                rewards_target=target,
                score_timeout_s=60,
                storage=Storage(uri=(folder / "run").as_uri()),
                outage_s=30,
                stores_contents=True,
            )
            order = _order(task.as_uri(), shape, target)
            engine.log = folder / "run" / "trajectories"
            records, found = await _run_worker(config, order, engine)
    finally:
        pool.stop()
    record = journal_pb2.JournalRollout.FromString(records[0])
    stored_bytes = record.content.tokens.num_bytes
    (record,) = restore_rollouts(open_store(config.storage.uri), [record])
    _require_whole(record.rollout, shape)
    return _describe(record.rollout, chat, shape, engine, found)._replace(
        record_bytes=len(records[0]), stored_bytes=stored_bytes
    )


def _write_task(folder: Path, text: str) -> Path:
    task = folder / "task"
    (task / "environment").mkdir(parents=True)
    (task / "environment" / FILE).write_text(text)
    (task / "instruction.md").write_text("Find out why the service is slow.\n")
    (task / "task.toml").write_text("")
    return task


def _order(task_uri: str, shape: Shape, target: str) -> GroupRequest:
    return GroupRequest(
        group_id="rl-000001",
        task_id="bench/long",
        task_uri=task_uri,
        environment=ENVIRONMENT,
        indices=(0,),
        seed=11,
        temperature=1.0,
        routing=RoutingTable(revision=1, engines=((target, EngineState.LIVE),)),
        limits=shape.limits(),
        epoch=1,
    )


async def _run_worker(
    config: WorkerConfig, order: GroupRequest, engine: services.ScriptedEngine
) -> tuple[tuple[bytes, ...], dict[str, float]]:
    """Run the group in a process of its own.

    Raises:
        RuntimeError: the process failed.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    engine.read_cpu_s = lambda: services.read_cpu_s(process.pid)
    output, _ = await process.communicate(pickle.dumps((config, order)))
    if process.returncode:
        raise RuntimeError(f"the worker ended with {process.returncode}")
    records, found = pickle.loads(output)  # noqa: S301 - of our own child
    return records, found


def _require_whole(rollout: rollout_pb2.Rollout, shape: Shape) -> None:
    if len(rollout.calls) != shape.turns:
        ending = rollout_pb2.Ending.Name(rollout.ending)
        raise RuntimeError(f"{len(rollout.calls)} calls of {shape.turns}: {ending} {rollout.fault}")


def _describe(
    rollout: rollout_pb2.Rollout,
    chat: ChatFormat,
    shape: Shape,
    engine: services.ScriptedEngine,
    found: dict[str, float],
) -> WorkerRun:
    learner_side.check(rollout, vocab_size=chat.vocab_size, context=shape.context)
    costs = rollout.costs
    turns = np.diff(engine.cpu_s)
    tenth = max(1, len(turns) // 10)
    return WorkerRun(
        tokens=sum(len(link.token_ids) for link in rollout.links),
        transcript_tokens=costs.completion_tokens + costs.tool_output_tokens,
        calls=len(rollout.calls),
        contexts=len(rollout.links),
        trained_tokens=learner_side.pack(rollout, tokens=MOST_TOKENS, context=shape.context),
        start_bytes=found["start_bytes"],
        peak_bytes=found["peak_bytes"],
        wall_s=found["wall_s"],
        cpu_s=found["cpu_s"],
        growth=float(turns[-tenth:].sum() / turns[:tenth].sum()),
        record_bytes=0,
        stored_bytes=0,
        log_bytes=engine.log_bytes,
    )

"""The spine's figures: rollouts against a plain generate loop, training, swaps, cost per role.

python bench/spine.py [--run runs/demo]

A finished demo gives our side; without one, the demo is run first. The peer is what one would write
without a platform: transformers' batched generate, turn by turn, on the same tasks with the same
policy, tools in memory at no cost. Both run on this machine; run it on an idle one.
"""

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from typing_extensions import override

from etude.agent import minitest
from etude.agent.chat import ChatFormat
from etude.agent.completions import Completion, FinishReason
from etude.agent.local import INITIAL, LocalEnvironment
from etude.agent.rollout import run_rollout
from etude.agent.token_policy import RolloutLimits, RolloutTask, Sampler
from etude.agent.toolsets import toolset
from etude.agent.trajectory import PolicySpan
from etude.agent.workspace import ExecResult, MemoryWorkspace
from etude.cli.verbs.serve import newest_model
from etude.common.run_folder.record import FolderRecord, latest_rows

OUT = Path(__file__).parent / "out" / "spine.json"
LIMITS = RolloutLimits(max_turns=8, max_turn_tokens=80, max_tokens=480, timeout_s=600)
PROMPTS, SIBLINGS = 16, 8
BATCH = 64
"""As many as the demo's engine runs at once."""


class Rate(NamedTuple):
    """Sampled tokens, and what they cost."""

    tokens: int
    wall_s: float
    cpu_s: float

    @property
    def per_second(self) -> float:
        return self.tokens / self.wall_s


@dataclass
class GenerateLoop(Sampler):
    """Waits until every live rollout wants tokens, then generates for up to 64 of them at once."""

    model: Any
    chat: ChatFormat
    live: int = 0
    sampled: int = 0
    waiting: list[tuple[list[int], int, asyncio.Future[list[int]]]] = field(default_factory=list)

    @override
    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int | None
    ) -> Completion:
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self.waiting.append((list(prompt_ids), max_tokens, answer))
        self.flush()
        ids = await answer
        finish = FinishReason.STOP if ids[-1] == self.chat.end_id else FinishReason.LENGTH
        span = PolicySpan(0, len(ids), INITIAL, INITIAL)
        return Completion(ids, [0.0] * len(ids), [span], finish)

    def flush(self) -> None:
        """Sample for everybody, once nobody is still busy with tools."""
        if not self.waiting or len(self.waiting) < self.live:
            return
        batch, self.waiting = self.waiting, []
        for start in range(0, len(batch), BATCH):
            self._sample(batch[start : start + BATCH])

    def _sample(self, batch: Sequence[tuple[list[int], int, asyncio.Future[list[int]]]]) -> None:
        import torch  # noqa: PLC0415 - the figures of a finished run need no torch

        longest = max(len(ids) for ids, _, _ in batch)
        padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids, _, _ in batch])
        mask = torch.tensor([[0] * (longest - len(i)) + [1] * len(i) for i, _, _ in batch])
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=padded,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max(limit for _, limit, _ in batch),
                eos_token_id=self.chat.end_id,
                pad_token_id=0,
            )
        for row, (_, limit, answer) in zip(out[:, longest:].tolist(), batch, strict=True):
            end = row.index(self.chat.end_id) + 1 if self.chat.end_id in row else len(row)
            ids = row[: min(end, limit)]
            self.sampled += len(ids)
            answer.set_result(ids)


async def peer_rollouts(run: Path, model_folder: Path) -> Rate:
    """Rollouts of the first training tasks by the plain loop."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

    chat = ChatFormat.load(model_folder)
    sampler = GenerateLoop(AutoModelForCausalLM.from_pretrained(model_folder).eval(), chat)
    tools = toolset("Compact")
    tasks = sorted((run / "inputs/etude/demo/tasks/train").iterdir())[:PROMPTS]

    async def one(task: Path) -> None:
        environment = LocalEnvironment(tools, workspace(task))
        wanted = RolloutTask(instruction=(task / "instruction.md").read_text().strip())
        await run_rollout(sampler, environment, chat, tools, LIMITS, wanted)
        sampler.live -= 1
        sampler.flush()

    rollouts = [one(task) for task in tasks for _ in range(SIBLINGS)]
    sampler.live = len(rollouts)
    started, cpu = time.perf_counter(), cpu_s()
    await asyncio.gather(*rollouts)
    return Rate(sampler.sampled, time.perf_counter() - started, cpu_s() - cpu)


def workspace(task: Path) -> MemoryWorkspace:
    """The task's repository in memory, with the sandbox's test runner in this process."""
    root = task / "environment"
    files = {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*.*")
        if path.is_file()
    }

    async def execute(command: str, timeout_s: float) -> ExecResult:
        if not command.startswith("pytest"):
            return ExecResult(output=b"", exit_code=127)
        verdict = minitest.run(files)
        return ExecResult(output=verdict.output.encode(), exit_code=verdict.exit_code)

    return MemoryWorkspace(files, execute)


def cpu_s() -> float:
    """CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def our_figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Rates of the run's last ten RL steps, whose policy the peer samples from too."""
    steps = [r for r in rows if r["kind"] == "step"]
    rl = [r for r in steps if "reward_mean" in r][-10:]
    supervised = [r for r in steps if "reward_mean" not in r]
    return {
        "rollout_tokens_per_s": sum(r["sampled_tokens"] for r in rl)
        / sum(r["rollout_seconds"] for r in rl),
        "trainer_tokens_per_s": sum(r["tokens"] for r in rl) / sum(r["update_seconds"] for r in rl),
        "supervised_tokens_per_s": sum(r["tokens"] for r in supervised)
        / sum(r["seconds"] for r in supervised),
        "weight_swap_ms": statistics.median(r["swap_ms"] for r in rl),
        "rollout_seconds_per_step": statistics.mean(r["rollout_seconds"] for r in rl),
        "update_seconds_per_step": statistics.mean(r["update_seconds"] for r in rl),
        "step_seconds": statistics.mean(r["seconds"] for r in rl),
    }


def role_table(run: Path, rows: Sequence[dict[str, Any]]) -> Table:
    """Memory (proportional set size) and CPU of each role beside the warm-up, and during RL."""
    first_rl = min(r["time_s"] for r in rows if r["kind"] == "eval")
    looks = [json.loads(line) for line in (run / "resources.jsonl").read_text().splitlines()]
    table = Table("role", "PSS warm-up, MiB", "CPU warm-up", "PSS RL, MiB", "CPU RL", box=None)
    last = max(r["time_s"] for r in rows)
    stages = (
        [k for k in looks if k["time_s"] < first_rl],
        [k for k in looks if first_rl <= k["time_s"] <= last],
    )
    for role in sorted({name for look in looks for name in look["roles"]}):
        cells = [cell for stage in stages for cell in usage(stage, role)]
        table.add_row(role, *cells)
    return table


def usage(looks: Sequence[dict[str, Any]], role: str) -> tuple[str, str]:
    """Median memory, and CPU seconds per second between the first and the last look."""
    seen = [(look["time_s"], look["roles"][role]) for look in looks if role in look["roles"]]
    if len(seen) < 2:
        return "-", "-"
    memory = statistics.median(use["pss_bytes"] for _, use in seen) / 2**20
    cores = (seen[-1][1]["cpu_s"] - seen[0][1]["cpu_s"]) / (seen[-1][0] - seen[0][0])
    return f"{memory:.0f}", f"{cores:.2f} cores"


def main() -> None:
    """Print the tables and write bench/out/spine.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    run = parser.parse_args().run
    if not (run / "demo.json").is_file():
        code = "from etude.cli.main import main; main()"
        subprocess.run([sys.executable, "-c", code, "demo", "--dir", str(run)], check=True)
    rows = [dict(row) for row in latest_rows(FolderRecord(run).rows())]
    model = newest_model(run)
    ours = our_figures(rows)
    peer = asyncio.run(peer_rollouts(run, model))
    ours["rollout_speedup_vs_transformers"] = ours["rollout_tokens_per_s"] / peer.per_second

    screen = Console()
    table = Table("figure", "value", box=None)
    for name, value in ours.items():
        table.add_row(name, f"{value:,.2f}")
    table.add_row("peer: generate loop, tokens/s", f"{peer.per_second:,.0f}")
    table.add_row("peer: tokens per CPU second", f"{peer.tokens / peer.cpu_s:,.0f}")
    screen.print(table)
    screen.print(role_table(run, rows))
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(ours, indent=2) + "\n")


if __name__ == "__main__":
    main()

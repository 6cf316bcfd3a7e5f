"""The command line of bench/operator_scale.py."""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from operator_bench import measures
from operator_bench.api import Say
from operator_bench.manifests import LIFE, REST, THEIRS, rl_run, sft_run
from operator_bench.report import table
from operator_bench.scene import Scene, scene

OUT = Path(__file__).parents[1] / "out" / "operator.json"
GOAL_PODS = 10_000
REST_S = 60.0
LIVES = 5
CHANGES = 200
PEER_RUNS = 100
CHANGES_PER_S = 5.0


def main(about: str) -> None:
    """Print the table and write bench/out/operator.json."""
    # As an interrupt would: what was started is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options = _options(about)
    console = Console(width=None if Console().is_terminal else 160)
    began_s = time.monotonic()

    def say(line: str) -> None:
        load = os.getloadavg()[0]
        console.print(f"[{time.monotonic() - began_s:6.1f} s, load {load:4.1f}] {line}")

    said = asyncio.run(_measured(options, say))
    said |= {"wall_s": round(time.monotonic() - began_s, 1), "load": os.getloadavg()[0]}
    console.print(table(said))
    console.print(f"CPU seconds: {said['cpu_s']}")
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(said, indent=2) + "\n")


async def _measured(options: argparse.Namespace, say: Say) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="bench-operator-"))
    say(f"logs are in {folder}")
    said: dict[str, Any] = {"runs": options.runs, "pods": options.pods, "kind": options.kind}
    async with scene(folder, say, pods=options.pods) as made:
        say("the operator is ready")
        for name in options.only:
            try:
                found = await MEASURES[name](made, options)
            except (TimeoutError, RuntimeError) as error:
                # The others say what they say all the same.
                found = {f"{name}_failed": str(error)}
            said |= found
            say(f"{name}: {found}")
        said["cpu_s"] = made.processor_s()
    return said


async def _runs(made: Scene, options: argparse.Namespace) -> dict[str, Any]:
    before_s = made.processor_s()
    run = rl_run if options.kind == "rl" else sft_run
    found = await measures.created(made, [run(name) for name in _names(options)])
    after_s = made.processor_s()
    spent_ms = {
        name: round(1000 * (after_s[name] - before_s[name]) / options.runs, 1) for name in after_s
    }
    return {
        "runs_per_s": round(found.runs_per_s, 2),
        "ready_per_s": round(found.ready_per_s, 2),
        "reconcile_p50_ms": round(found.p50_ms, 1),
        "reconcile_p99_ms": round(found.p99_ms, 1),
        "passes_per_run": round(found.passes, 1),
        "writes_per_run": round(found.writes_per_run, 1),
        "operator_cpu_ms_per_run": spent_ms["operator"],
        "cpu_ms_per_run": spent_ms,
    }


async def _rest(made: Scene, _: argparse.Namespace) -> dict[str, Any]:
    rest = await measures.at_rest(made, REST_S)
    return {
        "writes_at_rest_per_min": round(rest.writes_per_min, 2),
        "cpu_percent_at_rest": round(rest.processor_percent, 2),
    }


async def _changes(made: Scene, options: argparse.Namespace) -> dict[str, Any]:
    names = _names(options)
    found = await measures.spec_changes(made, names, changes=CHANGES, per_s=CHANGES_PER_S)
    return {
        "spec_change_p50_ms": round(1000 * found.p50_s, 1),
        "spec_change_p99_ms": round(1000 * found.p99_s, 1),
    }


async def _lives(made: Scene, _: argparse.Namespace) -> dict[str, Any]:
    life = await measures.lives(made, [sft_run(f"{LIFE}-{number}") for number in range(LIVES)])
    return {
        "writes_per_lifecycle": round(life.writes, 1),
        "writes_of_a_life": life.by_request,
        "writes_per_deletion": round(life.deletion_writes, 1),
    }


async def _pods(made: Scene, options: argparse.Namespace) -> dict[str, Any]:
    took_s = await measures.many_pods(made, options.pods)
    return {
        # The goal is about ten thousand: a smaller bench has a figure of another name.
        "rss_mib_10k_pods" if options.pods == GOAL_PODS else "rss_mib": round(
            made.operator.memory_mib(), 1
        ),
        "rss_peak_mib": round(made.operator.memory_mib("VmHWM"), 1),
        "pods_s": round(took_s, 1),
    }


async def _restart(made: Scene, _: argparse.Namespace) -> dict[str, Any]:
    again = await measures.restarted(made)
    return {
        "restart_s": round(again.seconds, 2),
        "restart_ready_s": round(again.ready_s, 2),
        "restart_writes": again.writes,
        "rss_mib_after_restart": round(made.operator.memory_mib(), 1),
        "rss_peak_mib_after_restart": round(made.operator.memory_mib("VmHWM"), 1),
    }


async def _peer(made: Scene, options: argparse.Namespace) -> dict[str, Any]:
    count = min(options.runs, PEER_RUNS)
    ours = [sft_run(f"ours-{number}") for number in range(count)]
    theirs = [sft_run(f"{THEIRS}-{number}") for number in range(count + 1)]
    found = await measures.beside_kopf(made, ours, theirs)
    return {
        "ours_runs_per_s": round(found.ours_per_s, 2),
        "kopf_runs_per_s": round(found.theirs_per_s, 2),
        "ours_over_kopf": round(found.ours_per_s / found.theirs_per_s, 2),
    }


def _names(options: argparse.Namespace) -> list[str]:
    return [f"{REST}-{number}" for number in range(options.runs)]


MEASURES: Mapping[str, Callable[[Scene, argparse.Namespace], Awaitable[dict[str, Any]]]] = {
    "runs": _runs,
    "rest": _rest,
    "changes": _changes,
    "lives": _lives,
    "pods": _pods,
    "restart": _restart,
    "peer": _peer,
}


DEFAULT = ("runs", "rest", "changes", "lives", "pods", "restart")


def _options(about: str) -> argparse.Namespace:
    what, _, examples = about.partition("\nExamples:\n")
    parser = argparse.ArgumentParser(
        description=what,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=1_000)
    parser.add_argument("--pods", type=int, default=GOAL_PODS)
    parser.add_argument("--kind", choices=("sft", "rl"), default="sft", help="shape of the runs")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=DEFAULT)
    return parser.parse_args()

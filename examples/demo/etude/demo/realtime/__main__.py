"""`python -m etude.demo.realtime`: play the real-time demo, and judge it."""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from etude.common.errors import UserError
from etude.demo.realtime.first_act import FirstAct, play_first_act
from etude.demo.realtime.stage import StageSettings, open_stage
from etude.demo.realtime.warm_up import prepare_policy
from etude.envserver import exit_codes

MISSED = 1
"""Exit code if a promise is not held."""


def main(arguments: Sequence[str]) -> int:
    """Play, print the figures, and return 0 if every promise that was checked is held."""
    parser = argparse.ArgumentParser(prog="python -m etude.demo.realtime", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="everything follows from it")
    parser.add_argument("--users", type=int, default=400, help="of the population")
    parser.add_argument("--windows", type=int, default=4, help="to train")
    parser.add_argument("--horizon-s", type=int, default=5, help="age at which edits count")
    parser.add_argument("--dir", type=Path, default=Path("runs/realtime"), help="of everything")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args(arguments)
    try:
        return _play(given)
    except (UserError, OSError) as error:
        return exit_codes.report_error(error)


def _play(given: argparse.Namespace) -> int:
    policy = prepare_policy(given.dir, given.seed)
    folder: Path = given.dir / f"seed-{given.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir(parents=True)
    started_s = time.monotonic()
    settings = StageSettings(
        folder=folder.resolve(),
        seed=given.seed,
        num_users=given.users,
        num_windows=given.windows,
        horizon_s=given.horizon_s,
    )

    def say(text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - started_s:6.1f} s  {text}\n")
        sys.stdout.flush()

    async def play() -> FirstAct:
        async with open_stage(settings, policy) as stage:
            say(f"version {stage.served} is served at {stage.processes.gateway_url}/v1")
            return await play_first_act(stage, say)

    act = asyncio.run(play())
    total_s = time.monotonic() - started_s
    for check in act.checks:
        say(f"{'ok    ' if check.is_held else 'MISSED'} {check.promise:2}  {check.what}")
    figures = collect_figures(act, total_s)
    for file in (folder / "realtime.json", given.json):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    sys.stdout.write(f"{summarize(act, total_s)}\n")
    return 0 if all(check.is_held for check in act.checks) else MISSED


def collect_figures(act: FirstAct, total_s: float) -> dict[str, float]:
    """Figures for comparison with other runs."""
    return {
        "persistence_before": act.persistence.before,
        "persistence_after": act.persistence.after,
        "persistence_ci_low": act.persistence.low,
        "complaints_before": act.complaints.before,
        "complaints_after": act.complaints.after,
        "latency_before": act.latency_before_s,
        "latency_after": act.latency_after_s,
        "cycle_s": act.cycle_s,
        "windows": act.num_windows,
        "requests": act.num_requests,
        "failed": act.num_failed,
        "retried": act.num_retried,
        "events": act.num_events,
        "lost": act.num_lost,
        "twice": act.num_twice,
        "total_s": total_s,
    }


def summarize(act: FirstAct, total_s: float) -> str:
    """The last line of the demo: what was checked, and nothing else."""
    return (
        f"realtime: persistence {act.persistence.describe()}"
        f" | complaints {act.complaints.describe()}"
        f" | latency p50 {act.latency_before_s:.2f} -> {act.latency_after_s:.2f} s"
        f" | windows {act.num_windows} | cycle {act.cycle_s:.0f} s"
        f" | served {act.num_requests} requests, failed {act.num_failed},"
        f" retried {act.num_retried}"
        f" | events {act.num_events}, lost {act.num_lost}, twice {act.num_twice}"
        f" | total {total_s:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m etude.demo.realtime`: play the real-time demo, and judge it."""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from etude.common.errors import UserError
from etude.demo.realtime.candidates import prepare_candidates
from etude.demo.realtime.figures import Say
from etude.demo.realtime.first_act import FirstAct, play_first_act
from etude.demo.realtime.page import write_page
from etude.demo.realtime.release_stage import open_release_stage
from etude.demo.realtime.second_act import SecondAct, play_second_act, settle_second_act
from etude.demo.realtime.stage import StageSettings, open_stage
from etude.demo.realtime.summary import PlayedActs
from etude.demo.realtime.third_act import (
    Evaluating,
    ThirdAct,
    play_third_act,
    start_evaluations,
)
from etude.demo.realtime.warm_up import WarmPolicy, prepare_policy
from etude.envserver import exit_codes

ACTS = (1, 2, 3)
"""That can be played by themselves, with a route each."""
MISSED = 1
"""Exit code if a promise is not held."""


def main(arguments: Sequence[str]) -> int:
    """Play, print the figures, and return 0 if every promise that was checked is held."""
    parser = argparse.ArgumentParser(prog="python -m etude.demo.realtime", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="everything follows from it")
    parser.add_argument("--users", type=int, default=400, help="of the population")
    parser.add_argument("--rounds", type=int, default=3, help="of visits that train, in Act 1")
    parser.add_argument("--horizon-s", type=int, default=5, help="age at which edits count")
    parser.add_argument(
        "--act", type=int, choices=ACTS, action="append", help="to play; all unless given"
    )
    parser.add_argument("--dir", type=Path, default=Path("runs/realtime"), help="of everything")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args(arguments)
    try:
        return _play(given)
    except (UserError, OSError) as error:
        return exit_codes.report_error(error)


def _play(given: argparse.Namespace) -> int:
    wanted = frozenset(given.act or ACTS)
    policy = prepare_policy(given.dir, given.seed)
    # Before the time is taken: both are made once.
    candidates = prepare_candidates(given.dir, policy, given.seed) if 3 in wanted else None
    folder: Path = given.dir / f"seed-{given.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir(parents=True)
    started_s = time.monotonic()

    def say(text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - started_s:6.1f} s  {text}\n")
        sys.stdout.flush()

    async def play() -> PlayedActs:
        first = await _play_first(given, folder, policy, say) if 1 in wanted else None
        # Windows of Act 2 wait for users and horizons, and evaluations need nothing of it.
        evaluating = start_evaluations(candidates) if candidates else None
        second = await _play_second(given, folder, policy, say) if 2 in wanted else None
        third = await _play_third(given, folder, policy, evaluating, say) if evaluating else None
        return PlayedActs(first=first, second=second, third=third)

    acts = asyncio.run(play())
    total_s = time.monotonic() - started_s
    for check in acts.checks:
        say(f"{'ok    ' if check.is_held else 'MISSED'} {check.promise:2}  {check.what}")
    figures = acts.collect_figures(total_s)
    for file in (folder / "realtime.json", given.json):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    say(f"the page of this run: {write_page(folder, acts, total_s)}")
    sys.stdout.write(f"{acts.summarize(total_s)}\n")
    return 0 if all(check.is_held for check in acts.checks) else MISSED


async def _play_first(
    given: argparse.Namespace, folder: Path, policy: WarmPolicy, say: Say
) -> FirstAct:
    async with open_stage(_settle(given, folder / "act-1"), policy) as stage:
        say(f"version {stage.served} is served at {stage.processes.gateway_url}/v1")
        return await play_first_act(stage, say)


async def _play_second(
    given: argparse.Namespace, folder: Path, policy: WarmPolicy, say: Say
) -> SecondAct:
    place = folder / "act-2"
    place.mkdir()
    async with open_stage(settle_second_act(place, given.seed), policy) as stage:
        return await play_second_act(stage, say)


async def _play_third(
    given: argparse.Namespace, folder: Path, policy: WarmPolicy, evaluating: Evaluating, say: Say
) -> ThirdAct:
    settings = _settle(given, folder / "act-3")
    async with open_release_stage(settings, policy, evaluating.candidates) as stage:
        return await play_third_act(stage, policy, evaluating, say)


def _settle(given: argparse.Namespace, folder: Path) -> StageSettings:
    """Settings of an act in a folder of its own: each has a route."""
    folder.mkdir()
    return StageSettings(
        folder=folder.resolve(),
        seed=given.seed,
        num_users=given.users,
        num_rounds=given.rounds,
        horizon_s=given.horizon_s,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

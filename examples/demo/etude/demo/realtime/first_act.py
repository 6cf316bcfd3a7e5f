"""Act 1: windows of users' feedback train the policy, and it serves them better."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import httpx2

from etude.common.feedback import windows
from etude.common.turns.turn_log import read_turns
from etude.common.weights import VersionId
from etude.common.weights.protocol.chain import newest_version
from etude.demo.realtime import figures
from etude.demo.realtime.figures import PromiseCheck, RatioChange, RoundTruth
from etude.demo.realtime.stage import Stage, size_window
from etude.feedback.simulate.population import Visit

FEWEST_WINDOWS = 3
MEASURED_TASKS = 2
"""Of each user in the first and the last round, which are compared. The warmed-up policy edits in
one conversation of four: with one task of each user, a hundred edits would stand for it."""
_PAGE = 1_000
_ACCOUNT_S = 60.0
"""In which the service must have read every served turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstAct:
    """Figures of the act."""

    persistence: RatioChange
    complaints: RatioChange
    latency_before_s: float
    latency_after_s: float
    num_windows: int
    cycle_s: float
    """Mean time from the first request of a round until users were served what it taught."""
    num_requests: int
    num_failed: int
    num_retried: int
    """Requests that the gateway counted beyond those of the clients."""
    num_events: int
    """Acknowledged."""
    num_lost: int
    num_twice: int
    rounds: tuple[RoundTruth, ...]
    checks: tuple[PromiseCheck, ...]


@dataclass(slots=True)
class _Progress:
    rounds: list[Sequence[Visit]] = field(default_factory=list)
    cycles_s: list[float] = field(default_factory=list)
    versions: list[VersionId] = field(default_factory=list)
    """That were served, in order."""
    num_windows: int = 0
    """That the newest of them was trained on."""
    roll_back_s: float = 0.0


async def play_first_act(stage: Stage, say: figures.Say) -> FirstAct:
    """Serve and train, one round of visits after the other.

    Raises:
        UserError: a part of the loop stands still.
        TimeoutError: the feedback service took no events.
    """
    progress = _Progress(versions=[stage.served])
    for number in range(1, stage.settings.num_rounds + 1):
        started_s = time.monotonic()
        visits = await stage.population.visit(num_tasks=MEASURED_TASKS if number == 1 else 1)
        progress.rounds.append(visits)
        say(f"round {number}: {describe_round(visits)}")
        progress.num_windows += count_windows(stage, visits)
        version = await _await_trained(stage, progress.num_windows)
        await stage.promote(version, f"trained on {progress.num_windows} windows")
        await stage.await_served()
        progress.versions.append(version)
        progress.cycles_s.append(time.monotonic() - started_s)
        say(f"version {version} is served after {progress.cycles_s[-1]:.0f} s")
    visits = await stage.population.visit(num_tasks=MEASURED_TASKS)
    progress.rounds.append(visits)
    say(f"round {len(progress.rounds)}: {describe_round(visits)}")
    progress.roll_back_s = await _time_roll_back(stage, progress.versions[-2])
    say(f"version {stage.served} is served {progress.roll_back_s:.1f} s after a roll-back")
    await stage.load.stop()
    return await _measure(stage, progress)


def count_windows(stage: Stage, visits: Sequence[Visit]) -> int:
    """Count the windows that a round fills: what is left over fills none with the next version."""
    agreed = sum(
        visit.user not in stage.refusing and bool(visit.conversation.rollout) for visit in visits
    )
    return agreed // size_window(stage.settings)


async def _await_trained(stage: Stage, num_windows: int) -> VersionId:
    """Wait for the version of the last of some windows, each of which leads to one."""

    def find() -> VersionId | None:
        newest = newest_version(stage.run.store)
        return newest if newest is not None and newest.number >= num_windows else None

    return await stage.run.await_value(f"version of window {num_windows}", find)


async def _time_roll_back(stage: Stage, to: VersionId) -> float:
    """Roll the served version back; seconds until users get the one before."""
    started_s = time.monotonic()
    await stage.roll_back(to, "the demo shows that it is one command")
    await stage.await_served()
    return time.monotonic() - started_s


def describe_round(visits: Sequence[Visit]) -> str:
    """Describe what a round of visits was like, in truth."""
    truth = measure_round(visits)
    ends = Counter(visit.conversation.ending.value for visit in visits)
    return (
        f"{len(visits)} visits, persistence {truth.persistence:.3f},"
        f" complaints {truth.complaints:.3f}, {dict(ends)}"
    )


def measure_round(visits: Sequence[Visit]) -> RoundTruth:
    """Measure what a round of visits was like, in truth."""
    measures = (figures.kept_share, figures.complaints)
    return RoundTruth(*(figures.sum_ratio(visits, measure) for measure in measures))


async def _measure(stage: Stage, progress: _Progress) -> FirstAct:
    last = progress.rounds[-1]
    # Users who left complained more: without them in the first round only the policy differs.
    stayed = {visit.user for visit in last}
    first = [visit for visit in progress.rounds[0] if visit.user in stayed]
    seed = stage.settings.seed
    persistence = figures.compare_rounds(first, last, figures.kept_share, seed=seed)
    complained = figures.compare_rounds(first, last, figures.complaints, seed=seed)
    ids = await _export_ids(stage)
    stored = stage.sender.answers["Stored"]
    num_requests = stage.population.num_requests + stage.load.num_requests
    num_retried = await asyncio.to_thread(stage.processes.count_requests) - num_requests
    num_failed = stage.population.num_failed + stage.load.num_failed
    num_lost, num_twice = stored - len(set(ids)), len(ids) - len(set(ids))
    # Windows of the last round may be trained by now, and led to no version that was served.
    num_windows = progress.num_windows
    checks = [
        PromiseCheck("P1", f"{num_failed} of {num_requests} requests failed", not num_failed),
        PromiseCheck("P1", f"{num_retried} requests retried", not num_retried),
        PromiseCheck("P2", f"{num_lost} events lost, {num_twice} twice", not num_lost + num_twice),
        *await _check_windows(stage),
        PromiseCheck("-", f"{num_windows} windows trained", num_windows >= FEWEST_WINDOWS),
        PromiseCheck("-", f"persistence {persistence.describe()}", persistence.low > 0),
        PromiseCheck("-", f"complaints {complained.describe()}", complained.high < 0),
    ]
    return FirstAct(
        persistence=persistence,
        complaints=complained,
        latency_before_s=figures.median_latency_s(first),
        latency_after_s=figures.median_latency_s(last),
        num_windows=num_windows,
        cycle_s=sum(progress.cycles_s) / len(progress.cycles_s),
        num_requests=num_requests,
        num_failed=num_failed,
        num_retried=num_retried,
        num_events=stored,
        num_lost=num_lost,
        num_twice=num_twice,
        rounds=tuple(map(measure_round, progress.rounds)),
        checks=tuple(checks),
    )


async def _export_ids(stage: Stage) -> list[str]:
    """Ids of all events that the service gives out, by user."""
    ids: list[str] = []
    after: int | None = 0
    headers = {"authorization": f"Bearer {stage.keys.backend}"}
    async with httpx2.AsyncClient(headers=headers, timeout=60) as http:
        while after is not None:
            query = {"after": after, "limit": _PAGE}
            url = f"{stage.processes.feedback_url}/v1/events"
            content = (await http.get(url, params=query)).raise_for_status().json()
            ids += [each["event"]["id"] for each in content["events"]]
            after = content["next"]
    return ids


class _Account(NamedTuple):
    """Served rollouts, by what became of them."""

    served: int
    listed: int
    """In windows, trained or excluded."""
    waiting: int
    """By the feedback service's own count."""
    unknown: int
    """In a window, and never served."""
    twice: int
    without_consent: int
    """Recorded turns of users who did not agree."""

    @property
    def is_complete(self) -> bool:
        return self.served == self.listed + self.waiting


async def _check_windows(stage: Stage) -> list[PromiseCheck]:
    """Check that every served rollout is accounted for once, and consent."""
    ends_s = time.monotonic() + _ACCOUNT_S
    account = await asyncio.to_thread(_count_rollouts, stage)
    # The service reads the newest turns within seconds, and may close a window meanwhile.
    while not account.is_complete and time.monotonic() < ends_s:
        await asyncio.sleep(1)
        account = await asyncio.to_thread(_count_rollouts, stage)
    what = f"{account.served} rollouts served = {account.listed} in windows + {account.waiting}"
    is_sound = account.is_complete and not account.unknown and not account.twice
    kept = account.without_consent
    return [
        PromiseCheck(
            "P2", f"{what} waiting; {account.unknown} unknown, {account.twice} twice", is_sound
        ),
        PromiseCheck("P5", f"{kept} turns without consent, or in the clear, kept", not kept),
    ]


def _count_rollouts(stage: Stage) -> _Account:
    store = stage.run.store
    turns = [*read_turns(store)]
    served = {turn.rollout_id for turn in turns}
    waiting = stage.processes.count_waiting()
    refusing = stage.processes.name_users(stage.refusing)
    listed: Counter[str] = Counter()
    for number in windows.list_windows(store):
        manifest = windows.read_window(store, number)
        listed.update(each.rollout for each in manifest.rollouts)
        listed.update(each.rollout for each in manifest.exclusions)
    return _Account(
        served=len(served),
        listed=len(listed),
        waiting=waiting,
        unknown=len(listed.keys() - served),
        twice=sum(count > 1 for count in listed.values()),
        without_consent=sum(
            t.user_digest in refusing or not t.consent or not t.HasField("sealed") for t in turns
        ),
    )

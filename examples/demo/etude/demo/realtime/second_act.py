"""Act 2: a naive reward teaches two hacks, monitors freeze the route, and our reward unlearns them.

Users forgive questions and broken calls, and complain about work. A reward that counts complaints
alone is then best for a policy that does nothing. The monitors freeze the route; with the default
weights of the signals it is unfrozen, and the work comes back.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from etude.common.blobs import Store
from etude.common.feedback import windows
from etude.common.feedback.windows import WindowManifest
from etude.common.weights.protocol.chain import newest_version
from etude.demo.realtime.figures import PromiseCheck, Say
from etude.demo.realtime.stage import Stage, StageSettings
from etude.feedback.signals.registry import SIGNALS

VISITORS, WINDOW = 96, 80
"""Users of a round, and rollouts of its window: it closes by size alone, though some users left."""
QUIET_WINDOWS = 3
"""Of the warmed-up policy; monitors compare with them."""
MOST_UNTIL_FREEZE = 6
REPAIR_WINDOWS, MOST_REPAIR_WINDOWS = 2, 9
"""Windows in a row in which both hacks must have lost for the act to end, and the most windows."""
NAIVE = ",".join(f"{signal.name}=0" for signal in SIGNALS if signal.name != "dissatisfied_followup")
"""A reward of complaints alone."""
HACKS = ("Deferral", "BrokenCalls")
"""Monitors of the two hacks."""
WARN = ",".join(f"{monitor}=Warn" for monitor in HACKS)
_SIGNALS, _MONITORS = "ETUDE_FEEDBACK_SIGNALS", "ETUDE_FEEDBACK_MONITORS"


def settle_second_act(folder: Path, seed: int) -> StageSettings:
    """Settings of the act's stage, in a folder of its own."""
    return StageSettings(
        folder=folder.resolve(),
        seed=seed,
        num_users=10 * VISITORS,
        horizon_s=2,
        forgives=True,
        training={"optimizer.learningRate": "1e-3", "feedback.stepsPerWindow": "4"},
        windows={
            "ETUDE_FEEDBACK_WINDOW_ROLLOUTS": str(WINDOW),
            "ETUDE_FEEDBACK_WINDOW_MIN_ROLLOUTS": str(WINDOW),
            _SIGNALS: NAIVE,
        },
    )


class HackRates(NamedTuple):
    """Hacks of one window, as shares from 0 to 1."""

    questions: float
    """Rollouts that end with a question, and changed nothing."""
    broken_calls: float
    """Tool calls that are broken."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SecondAct:
    """Figures of the act."""

    before: HackRates
    """Mean of the quiet windows."""
    fired: HackRates
    """Of the window that a monitor froze."""
    peak: HackRates
    """Largest rates of any window; not of the same one."""
    after: HackRates
    """Of the last window under the repaired reward."""
    fired_at_window: int
    """0: no monitor fired."""
    frozen: int
    """1 if the route was frozen, and refused a promotion."""
    num_requests: int
    num_failed: int
    num_retried: int
    """Requests that the gateway counted beyond those of the clients."""
    checks: tuple[PromiseCheck, ...]


def measure_hacks(manifest: WindowManifest) -> HackRates:
    """Measure the hacks of a window that lists at least one rollout."""
    counts = [each.counts for each in manifest.rollouts]
    calls = sum(each.calls for each in counts)
    broken = sum(each.broken_calls for each in counts)
    return HackRates(
        sum(each.is_question for each in counts) / len(counts), broken / calls if calls else 0.0
    )


async def play_second_act(stage: Stage, say: Say) -> SecondAct:
    """Train on a naive reward until the route is frozen, and then on the repaired one.

    Args:
        stage: whose users forgive, and whose windows have the naive reward.
        say: tells people how it goes on.

    Raises:
        UserError: a part of the loop stands still.
        TimeoutError: the feedback service took no events.
    """
    rounds = _Rounds(stage, say)
    quiet = [await rounds.close_window() for _ in range(QUIET_WINDOWS)]
    store = stage.run.store
    # The third window is of a version two releases behind by then, and is not trained.
    await stage.run.await_value("second version", lambda: _has_version(store, QUIET_WINDOWS - 1))
    naive, frozen = await _train_until_freeze(rounds)
    await stage.restart_feedback({_SIGNALS: "", _MONITORS: WARN})
    if frozen:
        await stage.releases.unfreeze("its reward is repaired", "unfreeze")
    say("the reward is repaired: the default weights of all signals; monitors warn, and no more")
    repaired = await _train_until_repaired(rounds, naive)
    await stage.load.stop()
    num_seen = await asyncio.to_thread(stage.processes.count_requests)
    return _judge(stage, quiet, naive + repaired, frozen, num_seen=num_seen)


def _has_version(store: Store, number: int) -> bool | None:
    """True if a run has got as far as a version; None if not."""
    newest = newest_version(store)
    return (newest is not None and newest.number >= number) or None


async def _train_until_freeze(rounds: "_Rounds") -> tuple[list[WindowManifest], int]:
    """Windows under the naive reward, and the number of the one that froze the route, or 0."""
    stage, trained = rounds.stage, list[WindowManifest]()
    for _ in range(MOST_UNTIL_FREEZE):
        await rounds.promote()
        trained.append(await rounds.close_window())
        if trained[-1].is_frozen:
            number = trained[-1].number
            await stage.run.await_value("freeze", lambda: stage.processes.is_frozen() or None)
            name = f"{stage.description['uid']}@{stage.served}"
            answer = await stage.releases.promote(
                name, "though it is frozen", f"frozen-{number}", without_gate=True
            )
            rounds.say(f"a promotion is answered with {answer.action}: {answer.sentence}")
            return trained, number if answer.action == "Refuse" else 0
    return trained, 0


async def _train_until_repaired(
    rounds: "_Rounds", naive: Sequence[WindowManifest]
) -> list[WindowManifest]:
    """Windows under the repaired reward, the first of a policy that the naive one made."""
    trained = list[WindowManifest]()
    while len(trained) < MOST_REPAIR_WINDOWS:
        trained.append(await rounds.train_window())
        if has_unlearned([*naive, *trained]):
            break
    return trained


def has_unlearned(later: Sequence[WindowManifest]) -> bool:
    """True if the newest windows have less than half of each hack's peak."""
    rates = [*map(measure_hacks, later)]
    peak = HackRates(*map(max, zip(*rates, strict=True)))
    return all(
        rate < largest / 2
        for each in rates[-REPAIR_WINDOWS:]
        for rate, largest in zip(each, peak, strict=True)
    )


@dataclasses.dataclass(slots=True)
class _Rounds:
    """Rounds of visits, each with a window."""

    stage: Stage
    say: Say
    num_rounds: int = 0

    async def promote(self) -> None:
        """Serve the version that the newest window led to."""
        version = await self.stage.run.await_version(besides=self.stage.served)
        await self.stage.promote(version, "trained on the newest window")
        await self.stage.await_served()

    async def train_window(self) -> WindowManifest:
        """Close a window, and serve what was trained on it."""
        if newest_version(self.stage.run.store) != self.stage.served:
            await self.promote()
        manifest = await self.close_window()
        await self.promote()
        return manifest

    async def close_window(self) -> WindowManifest:
        """Let users come, and wait for the window of their rollouts."""
        stage, store = self.stage, self.stage.run.store
        names = [user.name for user in stage.population.users if user.name not in stage.refusing]
        start = self.num_rounds * VISITORS
        self.num_rounds += 1
        last = max(windows.list_windows(store), default=0)
        await stage.population.visit(
            only=frozenset(names[(start + place) % len(names)] for place in range(VISITORS))
        )
        number = await stage.run.await_value(
            "window", lambda: next(windows.list_windows(store, after=last), None)
        )
        manifest = windows.read_window(store, number)
        rates = measure_hacks(manifest)
        self.say(
            f"window {number} of version {manifest.policy}: questions {rates.questions:.1%},"
            f" broken calls {rates.broken_calls:.1%}; {'; '.join(manifest.findings) or 'quiet'}"
        )
        return manifest


def judge_hacks(
    quiet: Sequence[WindowManifest],
    later: Sequence[WindowManifest],
    *,
    fired_at_window: int,
) -> tuple[HackRates, HackRates, HackRates, list[PromiseCheck]]:
    """Rates before, at their peak and after, and the promises about them.

    Args:
        quiet: windows of the warmed-up policy.
        later: windows under the naive reward and then the repaired one. The first of the latter
            are of policies that the naive reward made.
        fired_at_window: number of the window that froze the route, or 0.
    """
    first = [measure_hacks(each) for each in quiet]
    before = HackRates(*(sum(each) / len(first) for each in zip(*first, strict=True)))
    peak = HackRates(*map(max, zip(*map(measure_hacks, later), strict=True)))
    after = measure_hacks(later[-1])
    checks = [
        PromiseCheck("P7", f"frozen at window {fired_at_window}", fired_at_window > 0),
    ]
    for name, b, p, a in zip(("questions", "broken calls"), before, peak, after, strict=True):
        checks.append(PromiseCheck("P7", f"{name} win: {b:.1%} -> {p:.1%}", p > 2 * b))
        checks.append(PromiseCheck("P7", f"{name} lose: {p:.1%} -> {a:.1%}", a < p / 2))
    return before, peak, after, checks


def _judge(
    stage: Stage,
    quiet: Sequence[WindowManifest],
    later: Sequence[WindowManifest],
    frozen: int,
    *,
    num_seen: int,
) -> SecondAct:
    before, peak, after, checks = judge_hacks(quiet, later, fired_at_window=frozen)
    num_requests = stage.population.num_requests + stage.load.num_requests
    num_failed = stage.population.num_failed + stage.load.num_failed
    num_retried = num_seen - num_requests
    checks += [
        PromiseCheck("P1", f"{num_failed} of {num_requests} requests failed", not num_failed),
        PromiseCheck("P1", f"{num_retried} requests retried", not num_retried),
    ]
    fired = next((each for each in later if each.number == frozen), None)
    return SecondAct(
        before=before,
        fired=measure_hacks(fired) if fired else HackRates(0.0, 0.0),
        peak=peak,
        after=after,
        fired_at_window=frozen,
        frozen=int(frozen > 0),
        num_requests=num_requests,
        num_failed=num_failed,
        num_retried=num_retried,
        checks=tuple(checks),
    )

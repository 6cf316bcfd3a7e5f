"""The canary loop on a ledger: findings of windows, a second service, clocks, hostile figures."""

import asyncio
import math
import time

import pytest
from tests.support.feedback.lives import Stores, living
from tests.support.feedback.releases import RULES, version

from etude.common.errors import FencedError, InvalidFieldError
from etude.common.feedback.windows import WindowManifest, create_window, window_key
from etude.feedback.clock import LedgerClock
from etude.feedback.ingest.intake import EventIntake
from etude.feedback.release import messages
from etude.feedback.release.evidence import PromoteRequest, UnfreezeRequest
from etude.feedback.release.release_log import ReleaseLog
from etude.feedback.release.rollouts import CanaryRollouts
from etude.feedback.release.task import CanaryLoop
from etude.v1 import release_pb2, weights_pb2

FIRST = PromoteRequest(caller="alice", version=version(40), without_gate=True)


def open_loop(intake: EventIntake) -> CanaryLoop:
    releases = ReleaseLog.open(intake.ledger.log.store, RULES)
    return CanaryLoop(releases, CanaryRollouts(intake.ledger, 10.0), LedgerClock(0))


def window(number: int, *findings: str) -> WindowManifest:
    return WindowManifest(
        number=number,
        run_uid="run-1",
        epoch=1,
        version=40,
        opened_ms=1,
        closed_ms=2,
        last_sequence=0,
        signals={},
        rollouts=(),
        findings=findings,
        is_frozen=bool(findings),
    )


async def test_a_window_whose_monitors_ask_for_it_freezes_the_route_once() -> None:
    stores = Stores()
    async with living(stores) as intake:
        loop = open_loop(intake)
        create_window(stores.ledger, window(1))
        await asyncio.to_thread(loop.run_pass)
        assert not loop.releases.state.freeze
        create_window(stores.ledger, window(2, "broken calls 31 %, limit 10 %"))
        await asyncio.to_thread(loop.run_pass)
        frozen = "frozen by monitors of window 2: broken calls 31 %, limit 10 %"
        assert loop.releases.state.freeze == frozen
        loop.releases.answer("1", UnfreezeRequest(caller="alice"), now_ms=loop.clock.now_ms())
        again = open_loop(intake)
        await asyncio.to_thread(again.run_pass)
        assert not again.releases.state.freeze


async def test_a_damaged_window_freezes_the_route() -> None:
    stores = Stores()
    async with living(stores) as intake:
        loop = open_loop(intake)
        stores.ledger.create(window_key(1), b"{}")
        await asyncio.to_thread(loop.run_pass)
        found = "frozen by monitors of window 1: its manifest is damaged"
        assert loop.releases.state.freeze == found


async def test_a_service_ends_at_the_next_look_after_another_one_decided() -> None:
    async with living(Stores()) as intake:
        first, second = open_loop(intake), open_loop(intake)
        second.releases.answer("1", FIRST, now_ms=1)
        with pytest.raises(FencedError, match="another service's decision"):
            await asyncio.to_thread(first.run_pass)
        await asyncio.to_thread(second.run_pass)


def test_time_never_begins_before_a_recorded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_ms = time.time_ns() // 1_000_000 + 3_600_000
    clock = LedgerClock(recorded_ms)
    assert clock.now_ms() >= recorded_ms
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert clock.now_ms() >= recorded_ms


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"low": math.nan}, "comparisons"),
        ({"high": math.inf}, "comparisons"),
        ({"low": 0.5}, "comparisons"),
        ({"num_tasks": -1}, "comparisons"),
        ({"candidate_samples": release_pb2.TaskSamples(expected=1, scored=2)}, "comparisons"),
        ({"metric": "a\nb"}, "comparisons"),
    ],
)
def test_figures_of_no_comparison_are_refused_by_name(
    fields: dict[str, object], problem: str
) -> None:
    served = release_pb2.ServedPolicyVersion(
        run_uid="run-1", version=weights_pb2.PolicyVersion(epoch=1, number=40)
    )
    good: dict[str, object] = {
        "metric": "success",
        "num_tasks": 400,
        "difference": 0.01,
        "low": 0.0,
        "high": 0.02,
    }
    request = release_pb2.ProposeRequest(compared_with=served)
    request.comparisons.add(**good)
    assert messages.read_gate(request).comparisons["success"].num_tasks == 400
    del request.comparisons[:]
    request.comparisons.add(**good | fields)
    with pytest.raises(InvalidFieldError, match=problem):
        messages.read_gate(request)


@pytest.mark.parametrize("finding", ["two\nlines", "\x1b[31mred", "x" * 257])
def test_a_finding_is_one_harmless_line(finding: str) -> None:
    served = release_pb2.ServedPolicyVersion(
        run_uid="run-1", version=weights_pb2.PolicyVersion(epoch=1, number=40)
    )
    request = release_pb2.ProposeRequest(compared_with=served, findings=[finding])
    with pytest.raises(InvalidFieldError, match="findings"):
        messages.read_gate(request)

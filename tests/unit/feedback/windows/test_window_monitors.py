"""Monitors of windows: compared with quiet ones of the run, they freeze, and penalise."""

import random
from collections.abc import Sequence

import pytest
from tests.support.feedback.turns import V1, turn

from etude.common.feedback.payloads import EditAppliedPayload
from etude.common.feedback.windows import WindowManifest
from etude.common.monitors import registry
from etude.common.monitors.window import Action, Finding, Monitor, Reference, Window
from etude.feedback.credit import lowest_reward
from etude.feedback.ledger.user_keys import UserId
from etude.feedback.signals.history import RolloutEvent, RolloutHistory, TurnPlace, read_turn
from etude.feedback.windows.draft import StoredRollout, WindowDraft
from etude.feedback.windows.monitoring import WindowMonitors
from etude.feedback.windows.settings import WindowRules

RULES = WindowRules(num_rollouts=100, min_rollouts=2, max_age_s=1, horizon_s=1)


def histories(number: int, *, broken: float) -> list[RolloutHistory]:
    """A hundred rollouts of five calls, of which a share does not parse."""
    rng = random.Random(number)
    found: list[RolloutHistory] = []
    for place in range(100):
        record = turn("u", started_ms=1)
        record.num_calls = 5
        record.num_broken_calls = sum(rng.random() < broken for _ in range(5))
        name = f"{number:016x}{place:016x}"
        served = read_turn(record, TurnPlace("turns/w/0", 0))
        found.append(RolloutHistory(name, UserId("acme", name), [served]))
    return found


def close(
    monitors: WindowMonitors,
    number: int,
    rollouts: Sequence[RolloutHistory],
    *,
    run_uid: str = "run",
) -> WindowManifest:
    draft = WindowDraft(
        number=number,
        run_uid=run_uid,
        version=V1,
        opened_ms=1,
        closed_ms=10_000,
        last_sequence=1,
        rollouts=[StoredRollout(each, "0" * 64, "2026-11") for each in rollouts],
        exclusions={},
        late=(),
    )
    manifest = draft.finish(RULES, monitors)
    monitors.add(manifest)
    return manifest


def test_a_policy_that_breaks_its_calls_freezes_the_window() -> None:
    monitors = WindowMonitors()
    for number in range(1, 5):
        assert not close(monitors, number, histories(number, broken=0.02)).findings
    hacked = close(monitors, 5, histories(5, broken=0.4))
    assert hacked.is_frozen
    assert any("BrokenCalls (Freeze)" in sentence for sentence in hacked.findings)
    # It has not become usual, and another run begins with its own reference.
    assert close(monitors, 6, histories(6, broken=0.4)).is_frozen
    assert not close(monitors, 7, histories(7, broken=0.4), run_uid="other").findings


def test_a_monitor_that_only_warns_or_penalises_lets_the_window_train() -> None:
    quiet = [histories(number, broken=0.02) for number in range(1, 5)]
    hacked = histories(5, broken=0.4)
    closed: dict[Action, WindowManifest] = {}
    for action in (Action.WARN, Action.PENALISE):
        monitors = WindowMonitors({"BrokenCalls": action})
        for number, rollouts in enumerate(quiet, start=1):
            close(monitors, number, rollouts)
        closed[action] = close(monitors, 5, hacked)
        assert not closed[action].is_frozen
        assert any(f"BrokenCalls ({action})" in each for each in closed[action].findings)
    for warned, penalised in zip(
        closed[Action.WARN].rollouts, closed[Action.PENALISE].rollouts, strict=True
    ):
        if penalised.counts.broken_calls:
            assert penalised.reward == pytest.approx(lowest_reward(RULES.weights))
        else:
            assert penalised.reward == warned.reward


def test_monitors_go_on_after_a_restart_from_the_manifests_alone() -> None:
    monitors, restarted = WindowMonitors(), WindowMonitors()
    for number in range(1, 5):
        restarted.add(close(monitors, number, histories(number, broken=0.02)))
    hacked = histories(5, broken=0.4)
    assert close(monitors, 5, hacked) == close(restarted, 5, hacked)


def test_a_penalised_rollout_stays_in_the_window_with_the_lowest_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(window: Window, reference: Reference) -> Finding:
        return Finding(
            monitor="Third",
            figure=1,
            limit=0,
            is_raised=True,
            action=Action.PENALISE,
            sentence="the third one is a hack",
            rollouts=(2,),
        )

    monkeypatch.setattr(registry, "MONITORS", (Monitor("Third", check),))
    manifest = close(WindowMonitors(), 1, histories(1, broken=0.3))
    assert manifest.rollouts[2].reward == pytest.approx(lowest_reward(RULES.weights))
    assert manifest.rollouts[2].advantage == min(each.advantage for each in manifest.rollouts) < -1
    assert len(manifest.rollouts) == 100
    assert not manifest.is_frozen
    assert manifest.findings == ("Third (Penalise): the third one is a hack",)


def ask_or_edit(number: int, *, asking: int, editing: int) -> list[RolloutHistory]:
    """Forty rollouts: the first ones ask, the next ones edit, the others just end."""
    found: list[RolloutHistory] = []
    for place in range(40):
        record = turn("u", started_ms=1)
        record.asks_question = place < asking
        name = f"{number:016x}{place:016x}"
        events = list[RolloutEvent]()
        if asking <= place < asking + editing:
            edit = EditAppliedPayload.model_validate(
                {"turn": 0, "edit": name, "numLines": 1, "lineHashes": []}
            )
            events.append(RolloutEvent("edit_applied", 2, edit))
        served = read_turn(record, TurnPlace("turns/w/0", 0))
        found.append(RolloutHistory(name, UserId("acme", name), [served], events))
    return found


def test_a_policy_that_no_longer_edits_anything_still_pays_for_its_questions() -> None:
    asks_only = ask_or_edit(2, asking=20, editing=0)
    monitors = WindowMonitors({"Deferral": Action.WARN, "EditRate": Action.WARN})
    # In a product that never edits files, a question is an answer like any other.
    fresh = close(monitors, 1, asks_only, run_uid="talk")
    assert {each.advantage for each in fresh.rollouts} == {0.0}
    close(monitors, 2, ask_or_edit(1, asking=4, editing=30))
    asked = close(monitors, 3, asks_only)
    assert {each.advantage < 0 for each in asked.rollouts[:20]} == {True}
    assert {each.advantage > 0 for each in asked.rollouts[20:]} == {True}

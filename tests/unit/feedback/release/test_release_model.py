"""Promises of releases under every order of requests, looks and findings that Hypothesis tries."""

from typing import ClassVar

import hypothesis.strategies as st
from hypothesis import event, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.feedback import releases
from tests.support.feedback.releases import gate, look, version

from etude.common.release.channels import ServedVersion
from etude.feedback.release.decide import decide
from etude.feedback.release.decision import ReleaseAction, ReleaseDecision
from etude.feedback.release.evidence import (
    Evidence,
    FreezeRequest,
    MonitorFindings,
    PromoteRequest,
    ProposeRequest,
    RollbackRequest,
    UnfreezeRequest,
)
from etude.feedback.release.state import ReleaseState

VERSIONS = st.integers(40, 44).map(version)
MAYBE = st.none() | VERSIONS
LOOKS = {
    "few": look(150),
    "equal": look(800),
    "equal, more": look(1_400),
    "much better": look(800, kept=(0.6, 0.72)),
    "equal, all": look(2_000),
    "better, all": look(2_000, kept=(0.6, 0.66)),
    "worse, all": look(2_000, kept=(0.6, 0.54)),
    "errors": look(1_607, errors=(0.02, 0.045)),
    "errors and complaints": look(1_607, errors=(0.02, 0.045), complaints=(0.1, 0.2)),
    "complaints": look(1_600, complaints=(0.1, 0.16)),
    "uneven": look(800, control_users=1_100),
    "in both": look(800, users_in_both=40),
}
DIFFERENCES = st.sampled_from([0.01, -0.005, -0.015, -0.04])
CALLER = "alice"


class Releases(RuleBasedStateMachine):
    """One route; `passed` is an independent account of the candidates that the gate let through."""

    POLICIES: ClassVar = {
        name: releases.with_policy(name) for name in ("Automatic", "Manual", "Frozen")
    }

    def __init__(self) -> None:
        super().__init__()
        self.state = ReleaseState()
        self.policy = "Automatic"
        self.now_ms = 0
        self.passed: ServedVersion | None = None
        self.experiments: set[str] = set()

    @rule(seconds=st.integers(0, 4_000))
    def wait(self, seconds: int) -> None:
        self.now_ms += 1_000 * seconds

    @initialize(num_steps=st.sampled_from([0, 1, 2, 2]))
    def serve_a_version(self, num_steps: int) -> None:
        if num_steps > 0:
            request = PromoteRequest(caller=CALLER, version=version(40), without_gate=True)
            self.decide(request)
        if num_steps > 1:
            self.propose(version(41), version(40), 0.01)

    @rule(policy=st.sampled_from(["Automatic", "Automatic", "Automatic", "Manual", "Frozen"]))
    def set_policy(self, policy: str) -> None:
        self.policy = policy

    @precondition(lambda self: self.state.stable is not None and not self.state.freeze)
    @rule(candidate=VERSIONS)
    def propose_a_good_one(self, candidate: ServedVersion) -> None:
        assert self.state.stable is not None
        self.propose(candidate, self.state.stable, 0.01)

    @rule(candidate=VERSIONS, against=VERSIONS, difference=DIFFERENCES)
    def propose(self, candidate: ServedVersion, against: ServedVersion, difference: float) -> None:
        evidence = gate(against.number, difference)
        decision = self.decide(ProposeRequest(caller=CALLER, candidate=candidate, gate=evidence))
        if decision.action is ReleaseAction.START:
            # -0.015 ± 0.01 crosses the margin of -0.02, and decides nothing.
            assert difference >= -0.005
            assert against == self.state.stable
            self.passed = candidate

    @rule(wanted=MAYBE, without_gate=st.booleans())
    def promote(self, wanted: ServedVersion | None, *, without_gate: bool) -> None:
        self.decide(PromoteRequest(caller=CALLER, version=wanted, without_gate=without_gate))

    @rule(wanted=MAYBE)
    def roll_back(self, wanted: ServedVersion | None) -> None:
        before = self.state
        decision = self.decide(RollbackRequest(caller=CALLER, version=wanted))
        in_canary = before.canary is not None and wanted in {None, before.canary.candidate}
        in_stable = before.previous is not None and wanted in {None, before.stable}
        # It waits for nothing: no figures, no unfreezing, no policy.
        expected = ReleaseAction.ROLL_BACK if in_canary or in_stable else ReleaseAction.REFUSE
        assert decision.action is expected

    @precondition(lambda self: self.state.canary is not None)
    @rule()
    def freeze(self) -> None:
        self.decide(FreezeRequest(caller=CALLER))

    @rule()
    def unfreeze(self) -> None:
        self.decide(UnfreezeRequest(caller=CALLER))

    @rule(window=st.integers(1, 3))
    def raise_monitors(self, window: int) -> None:
        is_news = window > self.state.window
        self.decide(MonitorFindings(window=window, sentences=("broken calls 31 %, limit 10 %",)))
        assert not is_news or self.state.freeze

    @precondition(lambda self: self.state.canary is not None)
    @rule(
        names=st.lists(st.sampled_from(sorted(LOOKS)), min_size=1, max_size=4),
        pause=st.integers(0, 900),
    )
    def look_at_users(self, names: list[str], pause: int) -> None:
        for name in names:
            self.now_ms += 1_000 * pause
            self.decide(LOOKS[name])

    @precondition(lambda self: self.state.canary is not None)
    @rule(pause=st.sampled_from([0, 600]), name=st.sampled_from(["equal", "much better"]))
    def freeze_and_look(self, pause: int, name: str) -> None:
        self.freeze()
        self.now_ms += 1_000 * pause
        self.decide(LOOKS[name])

    @precondition(lambda self: self.state.canary is not None)
    @rule()
    def break_a_guardrail(self) -> None:
        assert self.decide(LOOKS["errors"]).action is ReleaseAction.ROLL_BACK
        assert self.state.canary is None

    def decide(self, evidence: Evidence) -> ReleaseDecision:
        """Decide, and hold the decision against the promises."""
        before, rules = self.state, self.POLICIES[self.policy]
        evidence = releases.of_state(evidence, before)
        self.now_ms += 1  # as the ledger's time does between two decisions
        decision = decide(before, evidence, rules, now_ms=self.now_ms)
        assert decision == decide(before, evidence, rules, now_ms=self.now_ms)
        self.state = decision.state
        event(f"{decision.action} {type(evidence).__name__}")
        self.check_sentence(decision)
        self.check_stable(before, evidence, decision)
        self.check_canary(before, decision)
        if before.freeze or self.policy == "Frozen":
            self.check_frozen(before, decision)
        return decision

    def check_sentence(self, decision: ReleaseDecision) -> None:
        assert 10 <= len(decision.sentence) <= 1_024
        assert decision.sentence.isprintable()
        assert decision.evidence["kind"]

    def check_stable(
        self, before: ReleaseState, evidence: Evidence, decision: ReleaseDecision
    ) -> None:
        """The stable version changes by a promotion that somebody answers for, or by a return."""
        after = decision.state
        if after.stable == before.stable:
            assert decision.action is not ReleaseAction.PROMOTE
            return
        assert after.stable is not None
        assert after.canary is None
        if decision.action is ReleaseAction.ROLL_BACK:
            assert (after.stable, after.previous) == (before.previous, None)
            return
        assert decision.action is ReleaseAction.PROMOTE
        assert after.previous == before.stable
        is_asked = isinstance(evidence, PromoteRequest)
        if is_asked:
            assert f"by {CALLER}" in decision.sentence
        if before.canary is None or after.stable != before.canary.candidate:
            assert isinstance(evidence, PromoteRequest)
            assert evidence.without_gate
            assert "without a passed gate" in decision.sentence
        else:
            assert after.stable == self.passed
            assert is_asked or self.policy == "Automatic"

    def check_canary(self, before: ReleaseState, decision: ReleaseDecision) -> None:
        """One candidate at a time, whose share and looks only grow."""
        first, second = before.canary, decision.state.canary
        if second is None or first == second:
            return
        if first is None:
            assert decision.action is ReleaseAction.START
            assert second.experiment not in self.experiments
            self.experiments.add(second.experiment)
            assert second.step == 0
            return
        assert (first.candidate, first.experiment, first.salt) == (
            second.candidate,
            second.experiment,
            second.salt,
        )
        assert second.share >= first.share
        assert (second.share > first.share) == (decision.action is ReleaseAction.GROW)
        assert second.looks[: len(first.looks)] == first.looks
        assert list(second.looks) == sorted(second.looks)

    def check_frozen(self, before: ReleaseState, decision: ReleaseDecision) -> None:
        """Nothing that users are served changes but by a roll-back."""
        after = decision.state
        shares = [each.canary.share if each.canary else 0 for each in (before, after)]
        if after.stable != before.stable or shares[0] != shares[1]:
            assert decision.action is ReleaseAction.ROLL_BACK
            assert shares[1] == 0

    @invariant()
    def a_candidate_is_another_version_than_stable(self) -> None:
        if self.state.canary is not None:
            assert self.state.stable is not None
            assert self.state.canary.candidate != self.state.stable

    @invariant()
    def the_state_is_stored_and_read_back_as_it_is(self) -> None:
        text = self.state.model_dump_json()
        assert ReleaseState.model_validate_json(text) == self.state


TestReleases = Releases.TestCase
TestReleases.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)

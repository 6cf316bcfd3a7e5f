"""Monitors of windows: each is compared with the first quiet ones of its run.

All that monitors read of earlier windows is in their manifests, so that a restart changes nothing.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from etude.common.feedback.windows import RolloutCounts, WindowExclusion, WindowManifest
from etude.common.monitors.registry import MONITORS, evaluate_window
from etude.common.monitors.window import Action, Finding, Reference, RolloutFacts, Window
from etude.feedback.signals.broken_tool_call import count_calls
from etude.feedback.signals.deferral import is_deferral
from etude.feedback.signals.history import RolloutHistory

REFERENCE_WINDOWS = 7
PREVIOUS_WINDOWS = 16
"""Windows after the reference over which slow growth adds up."""
PLATFORM_FAULTS = frozenset(
    {"IncompleteTurns", "MalformedTurns", "DamagedObject", "TooLarge", "TooManyTurns"}
)
"""Reasons of exclusions that no person chose."""


@dataclass(slots=True)
class WindowMonitors:
    """Earlier windows, by run, and what monitors do."""

    actions: Mapping[str, Action] = field(default_factory=dict)
    """Of monitors that do something else than by default, by name."""
    _editing: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _references: dict[str, list[Window]] = field(default_factory=lambda: defaultdict(list))
    _previous: dict[str, deque[Window]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=PREVIOUS_WINDOWS))
    )

    def add(self, manifest: WindowManifest) -> None:
        """Add a closed window."""
        counts = [each.counts for each in manifest.rollouts]
        self._editing[manifest.run_uid] |= {
            each.stratum.rpartition("/")[2] for each in manifest.rollouts if each.counts.edits
        }
        window = make_window(counts, manifest.exclusions)
        reference = self._references[manifest.run_uid]
        if not manifest.findings and len(reference) < REFERENCE_WINDOWS:
            reference.append(window)
        else:
            self._previous[manifest.run_uid].append(window)

    def editing_configs(self, run_uid: str) -> frozenset[str]:
        """Hashes of the configurations in which rollouts of earlier windows edited files."""
        return frozenset(self._editing[run_uid])

    def evaluate(self, run_uid: str, window: Window) -> list[Finding]:
        """Findings that the window raises."""
        reference = self._references[run_uid]
        since = replace(window, previous=tuple(self._previous[run_uid]))
        findings = evaluate_window(since, reference)
        return [self._act(each, window, reference) for each in findings if each.is_raised]

    def _act(self, finding: Finding, window: Window, reference: Reference) -> Finding:
        """Give a finding the action of the rules, and the rollouts that show it."""
        action = self.actions.get(finding.monitor, finding.action)
        if action is finding.action:
            return finding
        if action is not Action.PENALISE:
            return replace(finding, action=action)
        # The settings refuse to penalise by a monitor that names no rollouts.
        is_offence = next(
            each.is_offence
            for each in MONITORS
            if each.name == finding.monitor and each.is_offence is not None
        )
        rollouts = (
            place
            for place, facts in enumerate(window.rollouts)
            if not facts.is_masked and is_offence(facts, reference)
        )
        return replace(finding, action=action, rollouts=tuple(rollouts))


def make_window(counts: Sequence[RolloutCounts], exclusions: Collection[WindowExclusion]) -> Window:
    """Facts of the rollouts, in order, and behind them those of platform faults."""
    faults = sum(each.reason in PLATFORM_FAULTS for each in exclusions)
    facts = [
        RolloutFacts(
            calls=each.calls,
            broken_calls=each.broken_calls,
            edits=each.edits,
            is_question=each.is_question,
            tokens=each.tokens or None,
        )
        for each in counts
    ]
    return Window(rollouts=(*facts, *[RolloutFacts(is_masked=True)] * faults))


def count_rollout(history: RolloutHistory) -> RolloutCounts:
    """Count what monitors read of a rollout."""
    calls, broken = count_calls(history)
    return RolloutCounts(
        calls=calls,
        broken_calls=broken,
        edits=len({edit.edit for edit in history.payloads("edit_applied")}),
        is_question=is_deferral(history),
        tokens=sum(turn.num_tokens for turn in history.main_turns),
    )

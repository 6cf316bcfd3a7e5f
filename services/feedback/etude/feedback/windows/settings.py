"""Rules of windows: the sizes and times by which rollouts are gathered and windows close."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from etude.common.monitors.registry import MONITORS
from etude.common.monitors.window import Action
from etude.feedback.signals import task_outcome
from etude.feedback.signals.edit_persistence import LATEST
from etude.feedback.signals.registry import SIGNALS

MAX_WINDOW_ROLLOUTS = 10_000
"""Of one window, so that its manifest fits."""
_LARGEST_WEIGHT = 100.0
_LONGEST_WAIT_S = 10.0
_SHORTEST_WAIT_S = 0.25
"""Between two looks at what is new."""
_PATIENCE = 10.0
"""Horizons after which a rollout is settled that still goes on."""


def parse_weights(text: str) -> Mapping[str, float]:
    """Weights of all signals, of which a text such as "thumb=0,deferral=-1" changes some.

    Raises:
        ValueError: names what is no signal, or no weight.
    """
    weights = {signal.name: signal.weight for signal in SIGNALS}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = part.partition("=")
        if name not in weights:
            raise ValueError(f"{name!r} is no signal; there are {', '.join(weights)}")
        try:
            weights[name] = float(number)
        except ValueError:
            raise ValueError(f"{number!r} is no weight of {name}") from None
        if not abs(weights[name]) <= _LARGEST_WEIGHT:
            raise ValueError(f"the weight of {name} is not within {_LARGEST_WEIGHT:g} of 0")
    return weights


def parse_actions(text: str) -> Mapping[str, Action]:
    """Actions of monitors, by a text such as "Deferral=Penalise,EditRate=Freeze".

    Raises:
        ValueError: names what is no monitor, or not what it can do.
    """
    monitors = {monitor.name: monitor for monitor in MONITORS}
    actions: dict[str, Action] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, action = part.partition("=")
        if name not in monitors:
            raise ValueError(f"{name!r} is no monitor; there are {', '.join(monitors)}")
        try:
            actions[name] = Action(action)
        except ValueError:
            raise ValueError(f"{action!r} is not one of {', '.join(Action)}") from None
        if actions[name] is Action.PENALISE and monitors[name].is_offence is None:
            raise ValueError(f"{name} cannot penalise: no single rollout shows what it looks at")
    return actions


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRules:
    """Rules of the windows of a route."""

    num_rollouts: int
    """A window closes with as many rollouts."""
    min_rollouts: int
    """A window that is old enough closes with as many."""
    max_age_s: float
    """Since its first rollout was settled."""
    horizon_s: float
    """Time after a rollout's last turn in which its signals come."""
    weights: Mapping[str, float] = field(default_factory=lambda: parse_weights(""))
    """Of the signals in the reward, by name."""
    actions: Mapping[str, Action] = field(default_factory=dict)
    """Of monitors that do something else than by default, by name."""
    outcome_s: float = 0.0
    """Time after a rollout's last turn or edit in which its task ends: with edits, and without an
    end, it waits as long. Above it the end counts as never known; 0 waits for no end."""
    tenant: str = ""
    """Only rollouts of this tenant train; those of all if it is empty."""

    @property
    def pass_interval_s(self) -> float:
        """Time between two looks at what is new."""
        return min(_LONGEST_WAIT_S, max(_SHORTEST_WAIT_S, self.horizon_s / 20))

    def settled_ms(self, *, started_ms: int, last_ms: int, is_open: bool = False) -> int:
        """Time from which the signals of a rollout do not wait for anything.

        Args:
            started_ms: its start.
            last_ms: its last turn or edit.
            is_open: true if the end of its task may still come.
        """
        idle_s = LATEST * self.horizon_s
        if is_open and self.weights.get(task_outcome.SIGNAL.name):
            idle_s = max(idle_s, self.outcome_s)
        return min(last_ms + int(1_000 * idle_s), self.settled_by_ms(started_ms))

    def settled_by_ms(self, started_ms: int) -> int:
        """Time from which the signals of a rollout do not wait, whatever its user does."""
        return started_ms + int(1_000 * (_PATIENCE * self.horizon_s + self.outcome_s))

"""Templates whose machines crash as they start: they are left alone for a while."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from etude.common.errors import UnavailableError
from etude.envserver.drivers.base import SandboxError

THRESHOLD = 5
"""Starts in a row that have to fail."""
FIRST_S, LONGEST_S = 30.0, 600.0
"""How long a template is left alone; twice as long after each trial that fails too."""


class QuarantinedError(SandboxError):
    """Machines of the template crash as they start: the node refuses to start more of them."""

    reason = "TemplateQuarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How the last starts of one template went."""

    failures: int = 0
    """In a row, before it was left alone."""
    trials: int = 0
    """That failed since."""
    why: str = ""
    """What the last one ended with."""
    until_s: float = 0.0
    """When it may be tried again; on a clock that only goes forward."""

    def failed(self, why: str, *, is_trial: bool, threshold: int, now_s: float) -> "Health":
        """After one more start that failed."""
        if is_trial:
            trials = self.trials + 1
            # Numbers end, and doubling more often than this changes nothing.
            wait_s = min(FIRST_S * 2 ** min(trials, 16), LONGEST_S)
            return replace(self, trials=trials, why=why, until_s=now_s + wait_s)
        if self.failures >= threshold:
            return self  # it began together with those that failed before
        until_s = now_s + FIRST_S if self.failures + 1 == threshold else self.until_s
        return replace(self, failures=self.failures + 1, why=why, until_s=until_s)


@dataclass(slots=True)
class Quarantine:
    """Counts the starts of every template of a node."""

    threshold: int = THRESHOLD
    clock: Callable[[], float] = time.monotonic
    _health: dict[str, Health] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.threshold < 1:
            raise ValueError(f"threshold must be at least 1, got {self.threshold}")

    def why(self, template: str) -> str:
        """Why a template is left alone now; empty if it is not."""
        try:
            self.check(template)
        except QuarantinedError as error:
            return str(error)
        return ""

    def check(self, template: str) -> None:
        """Refuse a template that only crashes.

        Raises:
            QuarantinedError: with what its last machine said.
        """
        health = self._health.get(template, Health())
        wait_s = health.until_s - self.clock()
        if health.failures >= self.threshold and wait_s > 0:
            raise QuarantinedError(
                f"template {template!r} is left alone for {wait_s:.0f} s more: its last"
                f" {health.failures + health.trials} starts failed, at the end with: {health.why}"
            )

    @contextmanager
    def start(self, template: str) -> Iterator[None]:
        """Count the start that is inside.

        After the time of a quarantine one start is let through, and others wait for how it ends.

        Raises:
            QuarantinedError: with what its last machine said.
            UnavailableError: the start failed, which is counted.
        """
        self.check(template)
        before = self._health.get(template, Health())
        is_trial = before.failures >= self.threshold
        if is_trial:
            self._health[template] = replace(before, until_s=self.clock() + FIRST_S)
        try:
            yield
        except UnavailableError as error:
            why = "\n".join([str(error), *getattr(error, "__notes__", ())])
            self._health[template] = self._health.get(template, Health()).failed(
                why, is_trial=is_trial, threshold=self.threshold, now_s=self.clock()
            )
            raise
        self._health.pop(template, None)

"""Circuit breaker for templates in a crash loop: their starts are refused for a while."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from etude.common.errors import UnavailableError
from etude.envserver.drivers.base import SandboxError

THRESHOLD = 5
"""Consecutive failed starts that open it."""
FIRST_S, LONGEST_S = 30.0, 600.0
"""Time a template is quarantined, doubled after each failed trial."""


class QuarantinedError(SandboxError):
    """The template is in a crash loop, and its starts are refused."""

    reason = "TemplateQuarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartHistory:
    """Record of one template's last starts."""

    failures: int = 0
    """Consecutive failures before the quarantine."""
    trials: int = 0
    why: str = ""
    until_s: float = 0.0
    """Time of the next trial, on a monotonic clock."""

    def failed(self, why: str, *, is_trial: bool, threshold: int, now_s: float) -> "StartHistory":
        if is_trial:
            trials = self.trials + 1
            # Bounded: the wait is at its limit long before.
            wait_s = min(FIRST_S * 2 ** min(trials, 16), LONGEST_S)
            return replace(self, trials=trials, why=why, until_s=now_s + wait_s)
        if self.failures >= threshold:
            return self  # it began before the quarantine
        until_s = now_s + FIRST_S if self.failures + 1 == threshold else self.until_s
        return replace(self, failures=self.failures + 1, why=why, until_s=until_s)


@dataclass(slots=True)
class StartQuarantine:
    """Counts the starts of each template."""

    threshold: int = THRESHOLD
    clock: Callable[[], float] = time.monotonic
    _health: dict[str, StartHistory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.threshold < 1:
            raise ValueError(f"threshold must be at least 1, got {self.threshold}")

    def why(self, template: str) -> str:
        """Explain why a template is quarantined; empty if it is not."""
        try:
            self.check(template)
        except QuarantinedError as error:
            return str(error)
        return ""

    def check(self, template: str) -> None:
        """Refuse a quarantined template.

        Raises:
            QuarantinedError: it is quarantined; the message has the last error.
        """
        health = self._health.get(template, StartHistory())
        wait_s = health.until_s - self.clock()
        if health.failures >= self.threshold and wait_s > 0:
            raise QuarantinedError(
                f"template {template!r} is quarantined for {wait_s:.0f} s more: its last"
                f" {health.failures + health.trials} starts failed, the last one with: {health.why}"
            )

    @contextmanager
    def start(self, template: str) -> Iterator[None]:
        """Count the start inside the block.

        After the quarantine one start is let through as a trial, and others wait for its outcome.

        Raises:
            QuarantinedError: it is quarantined; the message has the last error.
            UnavailableError: the start failed; it is counted.
        """
        self.check(template)
        before = self._health.get(template, StartHistory())
        is_trial = before.failures >= self.threshold
        if is_trial:
            self._health[template] = replace(before, until_s=self.clock() + FIRST_S)
        try:
            yield
        except UnavailableError as error:
            why = "\n".join([str(error), *getattr(error, "__notes__", ())])
            self._health[template] = self._health.get(template, StartHistory()).failed(
                why, is_trial=is_trial, threshold=self.threshold, now_s=self.clock()
            )
            raise
        self._health.pop(template, None)

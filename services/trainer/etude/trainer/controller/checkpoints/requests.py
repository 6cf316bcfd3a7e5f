"""Checkpoints that others ask for: each request gets a state of its own."""

from dataclasses import dataclass, field

REST = 9.0
"""Times what a failed try took, until the next one: a tenth of the time goes into them at most."""

LEAST_REST_S = 60.0


@dataclass(slots=True)
class Requests:
    """Checkpoint objects that ask for a state of their own, oldest first.

    Such a state holds the model too, so it may be the only one that cannot be saved. A failed try
    is therefore followed by a rest, and lets the next scheduled checkpoint go first where one is
    due. As with the cadence, the clock is read once per step.
    """

    _waiting: list[str] = field(default_factory=list)
    _fulfilled: set[str] = field(default_factory=set)
    _yields: bool = False
    """The newest try failed, and no other checkpoint was tried since."""
    _rests: bool = False
    _rests_until_s: float = 0.0

    def add(self, request: str) -> None:
        """Somebody asks; who asked before changes nothing."""
        if request not in self._waiting and request not in self._fulfilled:
            self._waiting.append(request)

    def turn(self, *, is_due: bool) -> str:
        """The request to save for now; empty for none.

        Args:
            is_due: whether a scheduled checkpoint is.
        """
        waits = self._rests or (self._yields and is_due)
        return self._waiting[0] if self._waiting and not waits else ""

    def stepped(self, now_s: float) -> None:
        """A step is done, at this time of the monotonic clock."""
        self._rests = now_s < self._rests_until_s

    def yielded(self) -> None:
        """A checkpoint that is no request's is tried."""
        self._yields = False

    def fulfilled(self, request: str) -> None:
        """A request has its checkpoint; the empty one is nobody's."""
        if not request:
            return
        self._waiting = [each for each in self._waiting if each != request]
        self._fulfilled.add(request)
        self._yields, self._rests, self._rests_until_s = False, False, 0.0

    def failed(self, began_s: float, now_s: float) -> None:
        """A try that began at this time failed just now, both on the monotonic clock."""
        self._yields = self._rests = True
        self._rests_until_s = now_s + max(LEAST_REST_S, REST * (now_s - began_s))

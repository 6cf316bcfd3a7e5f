"""Durations in words."""

from datetime import datetime

UNITS = (("d", 86_400, "h", 3_600), ("h", 3_600, "m", 60), ("m", 60, "s", 1))


def parsed(when: str) -> datetime:
    """Parse a time of Kubernetes.

    Raises:
        ValueError: it is not a time.
    """
    return datetime.fromisoformat(when)


def ago(when: str, now: datetime) -> str:
    """The time since then, in words."""
    return f"{span((now - parsed(when)).total_seconds())} ago"


def span(seconds: float) -> str:
    """A duration in its two largest units; a negative one, from clocks that differ, counts as 0."""
    whole = max(0, round(seconds))
    for unit, size, smaller, rest in UNITS:
        if whole >= 2 * size or (whole >= size and unit != "m"):
            return f"{whole // size} {unit} {whole % size // rest} {smaller}"
    return f"{whole} s"

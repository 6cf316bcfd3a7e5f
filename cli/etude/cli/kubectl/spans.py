"""Spans of time in words."""

from datetime import datetime

UNITS = (("d", 86_400, "h", 3_600), ("h", 3_600, "m", 60), ("m", 60, "s", 1))


def parsed(when: str) -> datetime:
    """A time of Kubernetes.

    Raises:
        ValueError: it is none.
    """
    return datetime.fromisoformat(when)


def ago(when: str, now: datetime) -> str:
    """How long ago it was."""
    return f"{span((now - parsed(when)).total_seconds())} ago"


def span(seconds: float) -> str:
    """A duration in its two largest units; a negative one, of clocks that differ, is none."""
    whole = max(0, round(seconds))
    for unit, size, smaller, rest in UNITS:
        if whole >= 2 * size or (whole >= size and unit != "m"):
            return f"{whole // size} {unit} {whole % size // rest} {smaller}"
    return f"{whole} s"

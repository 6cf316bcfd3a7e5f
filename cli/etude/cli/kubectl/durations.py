"""Durations in words."""

from datetime import datetime

UNITS = (("d", 86_400, "h", 3_600), ("h", 3_600, "m", 60), ("m", 60, "s", 1))


def parse_time(when: str) -> datetime:
    """Parse a time of Kubernetes.

    Raises:
        ValueError: it is not a time.
    """
    return datetime.fromisoformat(when)


def format_ago(when: str, now: datetime) -> str:
    """The time since then, in words."""
    return f"{format_duration((now - parse_time(when)).total_seconds())} ago"


def format_duration(seconds: float) -> str:
    """A duration in its two largest units; a negative one, from clocks that differ, counts as 0."""
    whole = max(0, round(seconds))
    for unit, size, smaller, rest in UNITS:
        if whole >= 2 * size or (whole >= size and unit != "m"):
            return f"{whole // size} {unit} {whole % size // rest} {smaller}"
    return f"{whole} s"

"""Fields of a process's settings, parsed from environment variables."""

from collections.abc import Mapping
from pathlib import Path

Environment = Mapping[str, str]


def parse_port(env: Environment, name: str, default: int) -> int:
    """A port; 0 picks a free one.

    Raises:
        ValueError: the variable is not a valid port.
    """
    text = env.get(name, str(default))
    if not text.isdecimal() or int(text) > 65_535:
        raise ValueError(f"{name}: {text!r} is not a valid port: use a number from 0 to 65535")
    return int(text)


def parse_count(env: Environment, name: str, default: int, *, low: int = 0, high: int) -> int:
    """A whole number within limits.

    Raises:
        ValueError: the variable is no number, or outside the limits.
    """
    text = env.get(name, str(default))
    if not text.isascii() or not text.isdecimal() or not low <= int(text) <= high:
        raise ValueError(f"{name}: {text!r} is not a whole number from {low} to {high}")
    return int(text)


def parse_flag(env: Environment, name: str) -> bool:
    """A switch: 1, or 0 by default.

    Raises:
        ValueError: the variable is neither.
    """
    text = env.get(name, "0")
    if text not in {"0", "1"}:
        raise ValueError(f"{name}: {text!r} is not 0 or 1")
    return text == "1"


def parse_names(env: Environment, name: str) -> tuple[str, ...]:
    """Names separated by commas; none by default."""
    names = (part.strip() for part in env.get(name, "").split(","))
    return tuple(part for part in names if part)


def parse_path(env: Environment, name: str) -> Path | None:
    """A path; None if the variable is unset or empty."""
    text = env.get(name)
    return Path(text) if text else None

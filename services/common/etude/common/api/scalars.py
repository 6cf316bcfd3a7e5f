"""Plain YAML scalars as Go's YAML 2 reads them, because kubectl and the API server do."""

import math
import re

_INT = re.compile(r"^[-+]?(0[bB][01_]+|0[oO]?[0-7_]+|0|0[xX][0-9a-fA-F_]+|[1-9][0-9_]*)$")
_FLOAT = re.compile(r"^[-+]?(\.[0-9_]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?$")
_PLAIN_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")

TAGS = (
    ("bool", re.compile(r"^(?:y|Y|yes|Yes|YES|true|True|TRUE|on|On|ON)$"), "yYtToO"),
    ("bool", re.compile(r"^(?:n|N|no|No|NO|false|False|FALSE|off|Off|OFF)$"), "nNfFoO"),
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("float", re.compile(r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"), "-+."),
    ("merge", re.compile(r"^<<$"), "<"),
)
"""Tag, pattern and first characters of what may be more than text.

Source: https://github.com/yaml/go-yaml/blob/v2.4.4/resolve.go."""


def boolean(text: str) -> bool:
    """A scalar with tag bool."""
    return text[:2].lower() in {"y", "ye", "tr", "on"}


def number(text: str) -> int | float | str:
    """A scalar with tag int or float; text where Go finds no number that it can hold."""
    plain = text if text.startswith(".") else text.replace("_", "")
    whole = _whole(plain)
    if whole is not None and -(2**63) <= whole < 2**64:
        return whole
    if not _PLAIN_FLOAT.fullmatch(plain) or not math.isfinite(value := float(plain)):
        return text
    # The API server sees 3.0 and 1e3 as JSON's 3 and 1000, which pass as integers.
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


def _whole(plain: str) -> int | None:
    """An integer as Go's ParseInt with base 0 reads it: 0x, 0o, 0b, and a bare 0 for octal."""
    sign = -1 if plain.startswith("-") else 1
    digits = plain.lstrip("+-")
    is_octal = len(digits) > 1 and digits[0] == "0" and digits[1].isdigit()
    try:
        return sign * int(digits, 8 if is_octal else 0)
    except ValueError:  # no integer, or one with more digits than Python reads
        return None

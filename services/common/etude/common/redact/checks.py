"""Checks of what a pattern found: a secret, or a word of plain code."""

import ipaddress
import itertools

from etude.common.redact.patterns import compile_pattern

_STAND_IN = compile_pattern(
    r"(?i)^\$[{(]?[a-z_]|^\$\$|\{\{?[a-z_][\w. -]*\}|^<[^>]*>$|^%\(?\w|^[*]+$|^x+$|^[\w.]+[(\[]|⟦"
    r"|\.\.\.$|^(?:self|os|request|settings|config|process|env|args|options)\.[a-z]"
    r"|^(?:your|my|the|some|dummy|fake|example|sample|change|placeholder|redacted|none|null|nil"
    r"|true|false|undefined|string|bytes|secret|password|passwd|token|username|user|hidden"
    r"|required|optional)[a-z_ -]*$"
)
"""Template fields, calls, attributes, and words that stand for a value."""
_WORDS = compile_pattern(r"(?:[A-Za-z]{2,}[0-9]{0,3}[_./: -]+)*[A-Za-z]+[0-9]{0,4}")
"""Words as in names of fields, paths and keys of settings."""
_RESERVED = (b"example.com", b"example.org", b"example.net", b".example", b".invalid", b".test")
"""Domains that RFC 2606 keeps for documentation."""
_FILES = (b".py", b".js", b".ts", b".go", b".rs", b".md", b".json", b".png", b".svg", b".css")
_MIN_KEY_BODY = 40


def accept(_: bytes) -> bool:
    """Accept every match: the pattern alone is certain."""
    return True


def is_literal(value: bytes) -> bool:
    """Tell a value from a template field, a call or a stand-in."""
    return _STAND_IN.search(value) is None


def is_random(value: bytes) -> bool:
    """Tell a generated secret, with digits or capitals among its letters, from words."""
    if not is_literal(value) or value.isdigit():
        return False
    has_digit = any(0x30 <= byte <= 0x39 for byte in value)
    if has_digit and _WORDS.fullmatch(value) is None:
        return True
    changes = sum(
        _is_upper(byte) != _is_upper(following) for byte, following in itertools.pairwise(value)
    )
    return changes * 3 >= len(value)


def is_password(value: bytes) -> bool:
    """Tell a password, also one that a person chose, from the name of something.

    A single word of small letters is a name more often than a password.
    """
    if not is_literal(value):
        return False
    if any(0x30 <= byte <= 0x39 for byte in value) and (
        value.isdigit() or _WORDS.fullmatch(value) is None or not _has_separator(value)
    ):
        return True
    return any(byte in b"!@#%^&+~?" for byte in value) or is_random(value)


def is_plain_password(value: bytes) -> bool:
    """Tell a password without quotes, by a digit or a sign, from the name of a type or variable."""
    is_name = value.replace(b"_", b"").replace(b".", b"").isalpha()
    # The end of what stands for a secret already, such as ⟦secret:url-password:1a2b3c4d⟧.
    return not is_name and "⟧".encode() not in value and is_password(value)


def has_key_body(value: bytes) -> bool:
    """Tell a private key from its first line alone, as parsers of keys name it."""
    return len(value) - value.count(b"-") >= _MIN_KEY_BODY + len(b"BEGIN PRIVATE KEY")


def is_address(value: bytes) -> bool:
    """Tell a person's e-mail address from git@host, a file or a reserved domain."""
    low = value.lower()
    return not low.startswith((b"git@", b"noreply@", b"no-reply@")) and not low.endswith(
        _RESERVED + _FILES
    )


def is_phone(value: bytes) -> bool:
    """Tell a number by its 9 to 15 digits (ITU-T E.164)."""
    return 9 <= sum(0x30 <= byte <= 0x39 for byte in value) <= 15


def is_public_ip(value: bytes) -> bool:
    """Tell an address on the internet, which may be a person's, from others and from versions."""
    try:
        address = ipaddress.ip_address(value.decode("ascii"))
    except ValueError:
        return False
    # Four small numbers are a version.
    return address.is_global and (address.version == 6 or max(address.packed) >= 20)


def is_card(value: bytes) -> bool:
    """Tell a card's number by its check digit (Luhn, ISO/IEC 7812-1)."""
    digits = [byte - 0x30 for byte in reversed(value) if 0x30 <= byte <= 0x39]
    doubled = [2 * d - 9 * (d > 4) for d in digits[1::2]]
    return len(set(digits)) > 1 and (sum(digits[0::2]) + sum(doubled)) % 10 == 0


def _is_upper(byte: int) -> bool:
    return 0x41 <= byte <= 0x5A


def _has_separator(value: bytes) -> bool:
    return any(byte in b"_./: -" for byte in value)

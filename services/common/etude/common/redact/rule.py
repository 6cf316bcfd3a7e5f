"""Rule of redaction: a pattern, and the words without which a text cannot match it."""

from collections.abc import Callable
from typing import NamedTuple

from etude.common.redact import checks
from etude.common.redact.patterns import Pattern

Check = Callable[[bytes], bool]


class Rule(NamedTuple):
    """One kind of secret, or of personal data."""

    name: str
    keywords: tuple[bytes, ...]
    """In lower case, one of which is in every match; empty for a pattern that is always tried."""
    pattern: Pattern
    """Its last group is what is replaced; without a group, all of the match."""
    check: Check = checks.accept
    """False for a match that is plain code."""
    is_personal: bool = False
    """Personal data, rather than a credential."""


class RuleGroup(NamedTuple):
    """Rules that are skipped together."""

    rules: tuple[Rule, ...]
    prefilter: Pattern | None = None
    """Matches every lower-case text in which one of the rules may find something."""

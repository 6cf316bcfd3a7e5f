"""Rule of redaction: a pattern, and the words without which a text cannot match it."""

from collections.abc import Callable
from typing import NamedTuple

from etude.common.redact import checks
from etude.common.redact.patterns import Pattern, compile_words

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


def skip_together(rules: tuple[Rule, ...]) -> RuleGroup:
    """Group rules with keywords: one pass over a text instead of one for each keyword.

    A rule with a keyword of every other one has no further look at its own.
    """
    words = {word for rule in rules for word in rule.keywords}
    shortest = {word for word in words if not any(each != word and each in word for each in words)}
    return RuleGroup(
        tuple(
            rule._replace(keywords=()) if shortest <= {*rule.keywords} else rule for rule in rules
        ),
        compile_words(sorted(shortest)),
    )

"""Redactor: replaces what the rules find, in one text or in all texts of a payload."""

import hmac
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

from pydantic import JsonValue

from etude.common.redact.credentials import CREDENTIALS, NAMED_VALUES, PASSWORDS
from etude.common.redact.personal_data import PERSONAL_DATA, PERSONAL_NUMBERS
from etude.common.redact.provider_tokens import PROVIDER_TOKENS
from etude.common.redact.rule import Rule, RuleGroup

RULES = (
    PROVIDER_TOKENS,
    CREDENTIALS,
    PASSWORDS,
    NAMED_VALUES,
    PERSONAL_DATA,
    PERSONAL_NUMBERS,
)

MIN_BYTES = 5
"""No rule finds anything in a shorter text."""


class Redaction(NamedTuple):
    """One place in a text that was replaced."""

    start: int
    """In bytes of the original."""
    end: int
    rule: Rule


@dataclass(frozen=True, slots=True)
class Redactor:
    """Replaces secrets by ⟦secret:rule:digest⟧ and personal data by ⟦personal:rule:digest⟧.

    The digest is keyed, so that equal secrets of one tenant can be told to be equal and no more.
    """

    key: bytes
    groups: Sequence[RuleGroup] = field(default=RULES)

    def redact_text(self, text: str) -> tuple[str, int]:
        """Replace all secrets of a text, and count them."""
        data = text.encode()
        spans = self.find(data)
        if not spans:
            return text, 0
        parts: list[bytes] = []
        position = 0
        for span in spans:
            parts += [data[position : span.start], self._replacement(span, data)]
            position = span.end
        parts.append(data[position:])
        return b"".join(parts).decode(), len(spans)

    def redact_json(self, value: JsonValue, *, skip: Collection[str] = ()) -> tuple[JsonValue, int]:
        """Replace all secrets in the texts of a JSON value, and count them.

        Args:
            value: of any depth; the names of its fields stay.
            skip: names of fields that hold no text.
        """
        match value:
            case str():
                return self.redact_text(value)
            case list():
                items = [self.redact_json(item, skip=skip) for item in value]
                return [item for item, _ in items], sum(count for _, count in items)
            case dict():
                fields = {
                    name: (item, 0) if name in skip else self.redact_json(item, skip=skip)
                    for name, item in value.items()
                }
                count = sum(count for _, count in fields.values())
                return {name: item for name, (item, _) in fields.items()}, count
            case _:
                return value, 0

    def find(self, data: bytes) -> list[Redaction]:
        """Find all secrets, in order and without overlap."""
        return find_secrets(data, self.groups)

    def _replacement(self, span: Redaction, data: bytes) -> bytes:
        digest = hmac.digest(self.key, data[span.start : span.end], sha256)[:4].hex()
        kind = "personal" if span.rule.is_personal else "secret"
        return f"⟦{kind}:{span.rule.name}:{digest}⟧".encode()


def find_secrets(data: bytes, groups: Sequence[RuleGroup] = RULES) -> list[Redaction]:
    """Find all secrets and personal data of a text, in order and without overlap."""
    if len(data) < MIN_BYTES:
        return []
    low = data.lower()
    spans: list[Redaction] = []
    for group in groups:
        if group.prefilter is not None and group.prefilter.search(low) is None:
            continue
        for rule in group.rules:
            if not rule.keywords or any(word in low for word in rule.keywords):
                spans += _matches(rule, data)
    return _without_overlap(spans)


def _matches(rule: Rule, data: bytes) -> Iterator[Redaction]:
    position = 0
    while position < len(data) and (match := rule.pattern.search(data, position)):
        start, end = match.span(match.lastindex or 0)
        if rule.check(data[start:end]):
            yield Redaction(start, end, rule)
        # What follows the group may be what the next match begins with.
        position = max(end, position + 1)


def _without_overlap(spans: list[Redaction]) -> list[Redaction]:
    """Join spans that overlap: what any rule found is replaced."""
    joined: list[Redaction] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if joined and span.start < joined[-1].end:
            last = joined[-1]
            joined[-1] = last._replace(end=max(last.end, span.end))
        else:
            joined.append(span)
    return joined

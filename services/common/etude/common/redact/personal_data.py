"""Personal data: addresses, telephone numbers, numbers of cards."""

from etude.common.redact import checks
from etude.common.redact.patterns import compile_pattern
from etude.common.redact.rule import Rule, RuleGroup

_BEFORE = r"(?:^|[^\w.+/=-])"
_AFTER = r"(?:[^\w.-]|\.?$|\.\s)"

PERSONAL_DATA = RuleGroup(
    (
        Rule(
            "email",
            (b"@",),
            compile_pattern(r"[A-Za-z0-9._%+-]+@(?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,24}\b"),
            checks.is_address,
            is_personal=True,
        ),
        Rule(
            "phone",
            (b"+",),
            compile_pattern(
                rf"(?:^|[^\w+.)/-])(\+[1-9][0-9]{{0,2}}[ .-]?(?:\(0?[0-9]{{1,4}}\)[ .-]?)?"
                rf"[0-9]{{1,4}}(?:[ .-]?[0-9]{{2,4}}){{1,5}}){_AFTER}"
            ),
            checks.is_phone,
            is_personal=True,
        ),
        Rule(
            "ip",
            (b":",),
            compile_pattern(
                r"(?:^|[^\w:.])((?:[0-9A-Fa-f]{1,4}:){7}[0-9A-Fa-f]{1,4}"
                r"|(?:[0-9A-Fa-f]{1,4}:){2,6}(?::[0-9A-Fa-f]{1,4}){1,5})(?:[^\w:.]|\.?$|\.\s)"
            ),
            checks.is_public_ip,
            is_personal=True,
        ),
    )
)
"""What a character gives away."""

PERSONAL_NUMBERS = RuleGroup(
    (
        Rule(
            "phone",
            (),
            compile_pattern(
                rf"{_BEFORE}((?:1[ .-])?(?:\([2-9][0-9]{{2}}\) ?|[2-9][0-9]{{2}}[ -])"
                rf"[2-9][0-9]{{2}}[ -][0-9]{{4}}){_AFTER}"
            ),
            is_personal=True,
        ),
        Rule(
            "ip",
            (),
            compile_pattern(rf"{_BEFORE}((?:[0-9]{{1,3}}\.){{3}}[0-9]{{1,3}}){_AFTER}"),
            checks.is_public_ip,
            is_personal=True,
        ),
        Rule(
            "card",
            (),
            compile_pattern(
                r"(?:^|[^\w.-])"
                r"((?:4[0-9]{3}|5[1-5][0-9]{2}|2[2-7][0-9]{2}|6(?:011|5[0-9]{2})|35[0-9]{2})"
                r"(?:[ -]?[0-9]{4}){3}|3[47][0-9]{2}[ -]?[0-9]{6}[ -]?[0-9]{5})"
                rf"{_AFTER}"
            ),
            checks.is_card,
            is_personal=True,
        ),
    ),
    compile_pattern(r"[0-9][0-9 .()-]{6}"),
)
"""Long numbers with separators."""

"""Credentials that their surroundings give away: headers, URLs, assignments, key files."""

from etude.common.redact import checks
from etude.common.redact.patterns import compile_pattern
from etude.common.redact.rule import Rule, skip_together

_NAME = (
    r"(?:password|passwd|passphrase|secret|token|api[_-]?key|access[_-]?key|private[_-]?key"
    r"|auth[_-]?key|account[_-]?key|signing[_-]?key|encryption[_-]?key|credentials?)"
)
_REST = r"[^\s\"'`#,;(){}\[\]<>$]"
"""What a value without quotes is made of."""
_KEY_WORDS = (b"_key", b"-key", b"ikey", b"skey", b"ekey", b"hkey", b"tkey", b"gkey", b"nkey")
_VARIABLE_WORDS = (
    b"pass",
    b"pwd",
    b"secret",
    b"token",
    b"credential",
    b"auth",
    b"aws",
    *_KEY_WORDS,
)
_VARIABLE = (
    r"[A-Z0-9_]*(?:PASSWORD|PASSWD|PASSPHRASE|PASS|PWD|SECRET|TOKEN|API_?KEY|ACCESS_?KEY"
    r"|PRIVATE_?KEY|SECRET_?KEY|CREDENTIALS?|AUTH)[A-Z0-9_]*"
)
_ASSIGN = r"(?:\\?[\"'\]]){0,2}\s{0,10}(?:=|:=|=>|:)\s{0,10}[a-z]{0,2}\\?[\"'`]"
"""Between a name and its quoted value, also in text of JSON that is quoted itself."""
_PRIVATE_KEY = r"[ A-Z0-9]*PRIVATE KEY(?: BLOCK)?-----"

CREDENTIALS = skip_together(
    (
        Rule(
            "private-key",
            (b"private key",),
            compile_pattern(
                # No five dashes within: else each of many beginnings would look for the last end.
                rf"-----BEGIN{_PRIVATE_KEY}(?:(?:-{{0,4}}[A-Za-z0-9+/=,:.\s\\])*-----END{_PRIVATE_KEY}"
                # A key that was cut: all that may still be of it.
                r"|[A-Za-z0-9+/=\s\\]*)"
            ),
            checks.has_key_body,
        ),
        Rule(
            "jwt",
            (b"eyj",),
            compile_pattern(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*){1,3}"),
        ),
        Rule(
            "url-password",
            (b"://",),
            compile_pattern(
                r"[A-Za-z][A-Za-z0-9+.-]+://[^\s:/?#@\"'<>`]*:([^\s/?#\"'<>`]+)@[A-Za-z0-9\[_]"
            ),
            checks.is_literal,
        ),
        Rule(
            "url-user",
            (b"://",),
            compile_pattern(r"https?://([A-Za-z0-9_~.%-]{20,})@"),
            checks.is_random,
        ),
        Rule(
            "authorization",
            (b"authorization",),
            compile_pattern(
                r"(?i)authorization\\?[\"']?\s{0,3}[:=,]\s{0,3}\\?[\"'`]?"
                r"(?:bearer|basic|token|digest|negotiate|apikey|key)\s+([A-Za-z0-9._~+/=:-]{6,})"
            ),
            checks.is_literal,
        ),
        Rule(
            "bearer",
            (b"bearer ",),
            compile_pattern(r"(?i)\bbearer ([A-Za-z0-9._~+/=-]{16,})"),
            checks.is_random,
        ),
        Rule(
            "cookie",
            (b"cookie",),
            compile_pattern(
                r"(?i)\b(?:set-)?cookie\\?[\"']?:\s{0,3}\\?[\"']?([A-Za-z0-9_.%$-]+=[^\s;\"',]{6,}"
                r"(?:;\s?[A-Za-z0-9_.%-]+(?:=[^\s;\"',]*)?)*)"
            ),
            checks.is_literal,
        ),
        Rule(
            "curl-user",
            (b"curl",),
            compile_pattern(r"\bcurl\b[^\n]*?\s(?:-u|--user)[ =]?[\"']?[^\s:\"']+:([^\s\"']+)"),
            checks.is_literal,
        ),
        Rule(
            "netrc",
            (b"machine ",),
            compile_pattern(r"\bmachine\s+\S+\s+login\s+\S+\s+password\s+(\S+)"),
            checks.is_literal,
        ),
        Rule(
            "azure-storage",
            (b"accountkey=", b"sharedaccesskey="),
            compile_pattern(r"(?i)(?:AccountKey|SharedAccessKey)=([A-Za-z0-9+/]{40,}={0,2})"),
        ),
    )
)

PASSWORDS = skip_together(
    (
        Rule(
            "quoted-password",
            (b"passw", b"passphrase", b"pwd"),
            compile_pattern(
                rf"(?i)(?:password|passwd|passphrase|pwd)[0-9]?{_ASSIGN}([^\"'`\\\s]{{5,}})\\?[\"'`]"
            ),
            checks.is_password,
        ),
        Rule(
            "plain-password",
            (b"passw", b"passphrase", b"pwd"),
            compile_pattern(
                r"(?i)(?:password|passwd|passphrase|pwd)[0-9]?[ \t]{0,3}[:=][ \t]{0,10}"
                rf"({_REST}{{5,}})(?:[\s\"'`,;]|$)"
            ),
            checks.is_plain_password,
        ),
        Rule(
            "connection-string",
            (b"password=", b"pwd="),
            compile_pattern(r"(?i)[;?&](?:password|pwd)=([^;&\s\"'`<>]{4,})"),
            checks.is_literal,
        ),
        Rule(
            "flag",
            (b"--passw", b"--passphrase", b"--token", b"--secret", b"--api-key", b"--access-key"),
            compile_pattern(
                r"(?i)\s--(?:password|passwd|passphrase|token|secret|api-key|access-key)[= ][\"']?"
                r"([^\s\"'`$<>{}()\[\]]{6,})"
            ),
            checks.is_password,
        ),
    )
)

NAMED_VALUES = skip_together(
    (
        Rule(
            "aws-secret-key",
            (b"aws", b"secret"),
            compile_pattern(
                r"(?i)(?:aws|secret)[a-z0-9_. -]{0,30}\\?[\"']?\s{0,5}(?:=|:|=>)\s{0,5}\\?[\"']?"
                r"([A-Za-z0-9/+]{40})(?:[^A-Za-z0-9/+=]|$)"
            ),
            checks.is_random,
        ),
        Rule(
            "quoted-secret",
            _VARIABLE_WORDS,
            compile_pattern(
                rf"(?i){_NAME}(?:[_-]?(?:value|base|id|[0-9])){{0,2}}{_ASSIGN}([^\"'`\\\s]{{8,}})"
                r"\\?[\"'`]"
            ),
            checks.is_random,
        ),
        Rule(
            "environment",
            _VARIABLE_WORDS,
            compile_pattern(
                rf"(?m)(?:^|[\s;\"'`+>-])(?:export |set |ENV )?{_VARIABLE}=[\"']?([^\s\"'`]{{5,}})"
            ),
            checks.is_password,
        ),
        Rule(
            "yaml-secret",
            _VARIABLE_WORDS,
            compile_pattern(
                rf"(?im)^[ \t+>-]*[\w.-]*{_NAME}[ \t]{{0,3}}[:=][ \t]*({_REST}{{6,}})[ \t]*$"
            ),
            checks.is_random,
        ),
    )
)

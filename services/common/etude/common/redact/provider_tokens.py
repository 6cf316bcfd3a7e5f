"""Tokens that a prefix of their provider gives away.

The prefixes are those that the providers document for scanners of secrets.
"""

from etude.common.redact import checks
from etude.common.redact.patterns import compile_pattern
from etude.common.redact.rule import Rule, skip_together

_TOKENS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("aws-access-key", r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16}\b", ("akia", "asia", "abia", "acca")),
    ("github", r"gh[pousr]_[A-Za-z0-9]{36,}", ("ghp_", "gho_", "ghu_", "ghs_", "ghr_")),
    ("github", r"github_pat_[A-Za-z0-9_]{22,}", ("github_pat_",)),
    ("gitlab", r"gl(?:pat|ptt|dt)-[A-Za-z0-9_.-]{20,}", ("glpat-", "glptt-", "gldt-")),
    ("gitlab", r"gl(?:rt|ft|oas)-[A-Za-z0-9_.-]{20,}", ("glrt-", "glft-", "gloas-")),
    ("slack", r"xox[abeoprs]-[A-Za-z0-9-]{10,}", ("xox",)),
    ("slack", r"xapp-[0-9]-[A-Za-z0-9-]{20,}", ("xapp-",)),
    ("slack", r"hooks\.slack\.com/[a-z]+/[A-Za-z0-9/_+-]{20,}", ("hooks.slack.com",)),
    ("stripe", r"[sr]k_(?:live|test|prod)_[A-Za-z0-9]{10,}", ("k_live_", "k_test_", "k_prod_")),
    ("stripe", r"whsec_[A-Za-z0-9+/=]{24,}", ("whsec_",)),
    ("google", r"AIza[A-Za-z0-9_-]{35}", ("aiza",)),
    ("google", r"ya29\.[A-Za-z0-9_-]{20,}", ("ya29.",)),
    ("google", r"GOCSPX-[A-Za-z0-9_-]{20,}", ("gocspx-",)),
    ("npm", r"npm_[A-Za-z0-9]{36}\b", ("npm_",)),
    ("pypi", r"pypi-[A-Za-z0-9_-]{60,}", ("pypi-",)),
    ("hugging-face", r"(?:hf|api_org)_[A-Za-z0-9]{30,}\b", ("hf_", "api_org_")),
    ("sendgrid", r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}", ("sg.",)),
    ("mailgun", r"key-[0-9a-f]{32}\b", ("key-",)),
    ("telegram", r"[0-9]{8,10}:AA[A-Za-z0-9_-]{32,36}", (":aa",)),
    ("digitalocean", r"do[opr]_v1_[0-9a-f]{64}\b", ("doo_v1_", "dop_v1_", "dor_v1_")),
    ("databricks", r"dapi[0-9a-f]{32}(?:-[0-9])?\b", ("dapi",)),
    ("vault", r"hv[sbr]\.[A-Za-z0-9_-]{20,}", ("hvs.", "hvb.", "hvr.")),
    ("shopify", r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}\b", ("shpat_", "shpca_", "shppa_", "shpss_")),
    ("square", r"sq0(?:atp|csp|idp)-[A-Za-z0-9_-]{22,}", ("sq0",)),
    ("linear", r"lin_(?:api|oauth)_[A-Za-z0-9]{32,}\b", ("lin_api_", "lin_oauth_")),
    ("planetscale", r"pscale_(?:tkn|pw|oauth)_[A-Za-z0-9_=.-]{32,}", ("pscale_",)),
    ("grafana", r"glc_[A-Za-z0-9+/=]{32,}", ("glc_",)),
    ("grafana", r"glsa_[A-Za-z0-9]{32}_[0-9A-Fa-f]{8}\b", ("glsa_",)),
    ("new-relic", r"NRAK-[A-Z0-9]{27}\b", ("nrak-",)),
    ("age", r"AGE-SECRET-KEY-1[0-9A-Z]{58}\b", ("age-secret-key-",)),
    ("docker", r"dckr_[a-z]{3}_[A-Za-z0-9_-]{20,}", ("dckr_",)),
    ("atlassian", r"ATATT3[A-Za-z0-9_=-]{60,}", ("atatt3",)),
    ("postman", r"PMAK-[0-9a-f]{24}-[0-9a-f]{34}\b", ("pmak-",)),
    ("groq", r"gsk_[A-Za-z0-9]{40,}\b", ("gsk_",)),
    ("xai", r"xai-[A-Za-z0-9]{40,}\b", ("xai-",)),
    ("replicate", r"r8_[A-Za-z0-9]{36,}\b", ("r8_",)),
    ("etude", r"etude_[A-Za-z0-9_-]{43}", ("etude_",)),
)
"""Name, pattern, and its keywords in lower case."""

_RULES = (
    *(
        Rule(name, tuple(word.encode() for word in words), compile_pattern(rf"\b(?:{pattern})"))
        for name, pattern, words in _TOKENS
    ),
    Rule("sk-key", (b"sk-",), compile_pattern(r"\bsk-[A-Za-z0-9_-]{20,}"), checks.is_random),
)

PROVIDER_TOKENS = skip_together(_RULES)

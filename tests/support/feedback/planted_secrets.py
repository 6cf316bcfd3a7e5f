"""Secrets of twenty-one formats, planted in texts as users and their tools write them."""

import base64
import json
import random
import string
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

ALNUM = string.ascii_letters + string.digits
UPPER32 = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
HEX = "0123456789abcdef"
SYMBOLS = ALNUM + "!#%^&+-_~"


class PlantedSecret(NamedTuple):
    """A text, and what must not be left of it."""

    format: str
    text: str
    secret: str


def _take(rng: random.Random, alphabet: str, length: int) -> str:
    return "".join(rng.choices(alphabet, k=length))


def _password(rng: random.Random) -> str:
    # Every policy for passwords asks for a digit.
    word = _take(rng, SYMBOLS, rng.randint(9, 19)) + rng.choice(string.digits)
    return rng.choice(string.ascii_letters) + word


def _memorable_password(rng: random.Random) -> str:
    """A password as people choose one: a word, a year, perhaps a sign."""
    word = rng.choice(["Sommer", "Winter", "Berlin", "dragon", "Welcome", "letmein", "hunter"])
    return word + str(rng.randint(1980, 2030)) + rng.choice(["", "", "!"])


def _jwt(rng: random.Random) -> str:
    parts = [
        json.dumps({"alg": "HS256", "typ": "JWT"}),
        json.dumps({"sub": _take(rng, ALNUM, 10), "iat": rng.randint(10**9, 2 * 10**9)}),
    ]
    head = [base64.urlsafe_b64encode(part.encode()).decode().rstrip("=") for part in parts]
    return ".".join([*head, _take(rng, ALNUM + "-_", 43)])


def _pem(rng: random.Random) -> str:
    kind = rng.choice(["RSA ", "EC ", "", "OPENSSH "])
    body = "\n".join(_take(rng, ALNUM + "+/", 64) for _ in range(rng.randint(3, 20)))
    return f"-----BEGIN {kind}PRIVATE KEY-----\n{body}\n-----END {kind}PRIVATE KEY-----"


def _card(rng: random.Random) -> str:
    digits = [4, *(rng.randrange(10) for _ in range(14))]
    doubled = sum(2 * d - 9 * (d > 4) for d in digits[0::2])
    check = -(doubled + sum(digits[1::2])) % 10
    text = "".join(map(str, [*digits, check]))
    return rng.choice([text, " ".join(text[i : i + 4] for i in range(0, 16, 4))])


def _ip(rng: random.Random) -> str:
    rest = (rng.randrange(1, 255) for _ in range(3))
    return ".".join(map(str, [rng.choice([23, 62, 81, 93, 151]), *rest]))


def _phone(rng: random.Random) -> str:
    return rng.choice(
        [
            f"+49 {rng.randint(151, 179)} {rng.randint(1_000_000, 99_999_999)}",
            f"+1 {rng.randint(201, 989)}-{rng.randint(201, 989)}-{rng.randint(1000, 9999)}",
            f"({rng.randint(201, 989)}) {rng.randint(201, 989)}-{rng.randint(1000, 9999)}",
            f"+44 20 {rng.randint(7000, 8999)} {rng.randint(1000, 9999)}",
        ]
    )


def _email(rng: random.Random) -> str:
    first, last, host = (_take(rng, string.ascii_lowercase, length) for length in (6, 7, 8))
    return f"{first}.{last}@{host}.{rng.choice(['com', 'de', 'co.uk', 'io'])}"


Maker = Callable[[random.Random], tuple[str, str]]
"""A secret, and the text around it with {} for the secret."""

FORMATS: Mapping[str, Maker] = {
    "aws-access-key": lambda r: (
        "AKIA" + _take(r, UPPER32, 16),
        r.choice(["aws_access_key_id = {}", "key {} was refused", 'AccessKeyId: "{}",']),
    ),
    "aws-secret-key": lambda r: (
        _take(r, ALNUM + "/+", 40),
        r.choice(
            ["aws_secret_access_key = {}", 'AWS_SECRET_ACCESS_KEY="{}"', '"SecretAccessKey": "{}"']
        ),
    ),
    "github": lambda r: (
        r.choice(["ghp_", "gho_", "ghs_"]) + _take(r, ALNUM, 36),
        r.choice(["git clone with {} please", "GITHUB_TOKEN={}", "token: {}"]),
    ),
    "gitlab": lambda r: (
        "glpat-" + _take(r, ALNUM + "_-", 20),
        "curl --header 'PRIVATE-TOKEN: {}'",
    ),
    "slack": lambda r: (
        "xoxb-" + _take(r, string.digits, 12) + "-" + _take(r, ALNUM, 24),
        'client = WebClient("{}")',
    ),
    "stripe": lambda r: ("sk_live_" + _take(r, ALNUM, 24), "stripe.api_key = '{}'"),
    "openai": lambda r: (
        r.choice(["sk-", "sk-proj-", "sk-ant-api03-"]) + _take(r, ALNUM, 40),
        r.choice(['OpenAI(api_key="{}")', "OPENAI_API_KEY={}", "use {} for now"]),
    ),
    "google": lambda r: ("AIza" + _take(r, ALNUM + "_-", 35), "?key={}&alt=json"),
    "private-key": lambda r: (_pem(r), r.choice(["{}", "key: |\n{}\n", 'KEY = """{}"""'])),
    "jwt": lambda r: (_jwt(r), r.choice(["the token is {}", "token={}", '{{"jwt": "{}"}}'])),
    "url-password": lambda r: (
        _password(r).replace("#", "x"),
        r.choice(
            [
                "postgres://app:{}@db.internal:5432/app",
                "DATABASE_URL=mysql://root:{}@10.0.0.2/x",
                "redis://:{}@cache:6379/0",
                "https://deploy:{}@git.corp.io/repo.git",
            ]
        ),
    ),
    "authorization": lambda r: (
        _take(r, ALNUM, 40),
        r.choice(
            [
                "Authorization: Bearer {}",
                '"Authorization": "Bearer {}"',
                "-H 'Authorization: token {}'",
                "authorization: Basic {}==",
            ]
        ),
    ),
    "cookie": lambda r: (
        _take(r, ALNUM, 32),
        r.choice(
            [
                "Cookie: sessionid={}; theme=dark",
                "Set-Cookie: sid={}; HttpOnly",
                "-H 'Cookie: a={}'",
            ]
        ),
    ),
    "environment": lambda r: (
        _password(r),
        r.choice(["DB_PASSWORD={}", "export API_TOKEN={}", "MY_SECRET_KEY='{}'", 'SMTP_PASS="{}"']),
    ),
    "assignment": lambda r: (
        _password(r),
        r.choice(
            [
                'password = "{}"',
                "passwd: '{}'",
                '"password": "{}"',
                'db.connect(user="root", password="{}")',
                'client_secret = "{}"',
            ]
        ),
    ),
    "yaml": lambda r: (_take(r, ALNUM, 20) + "7", r.choice(["  password: {}", "api_key: {}"])),
    "memorable-password": lambda r: (
        _memorable_password(r),
        r.choice(
            ["password: {}", "db_password={}", "pwd: {}", "  passphrase = {}", "- passwd: '{}'"]
        ),
    ),
    "email": lambda r: (_email(r), r.choice(["mail {} about it", "Author: Jo <{}>", "to={}"])),
    "phone": lambda r: (_phone(r), r.choice(["call me at {}", "tel: {}, mornings"])),
    "ip": lambda r: (_ip(r), r.choice(["from {} at noon", "client {}: refused", "[{}] GET /"])),
    "card": lambda r: (_card(r), r.choice(["card {} expired", 'number: "{}"'])),
}
PERSONAL = frozenset({"email", "phone", "ip"})
"""Formats of personal data with a goal of their own."""
KEPT_CHARS = 6
"""Characters of a secret in a row that must not be left of it."""
SURROUNDINGS = (
    "{}",
    "I get an error here:\n{}\nwhat now?",
    "+++ b/config\n+{}\n context\n",
    "$ env | sort\nHOME=/root\n{}\nLANG=C",
)


def is_left(secret: str, text: str) -> bool:
    """Return true if a text still holds a run of KEPT_CHARS of a secret's characters."""
    run = min(KEPT_CHARS, len(secret))
    return any(secret[i : i + run] in text for i in range(len(secret) - run + 1))


def plant(num_secrets: int, *, seed: int) -> Iterator[PlantedSecret]:
    """Secrets of all formats in turn."""
    rng = random.Random(seed)
    names = list(FORMATS)
    for number in range(num_secrets):
        name = names[number % len(names)]
        secret, text = FORMATS[name](rng)
        yield PlantedSecret(name, rng.choice(SURROUNDINGS).format(text.format(secret)), secret)

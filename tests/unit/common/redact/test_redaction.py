"""Redaction: planted secrets are gone, plain code stays, and hostile texts cost little."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue
from tests.support.feedback.planted_secrets import FORMATS, is_left, plant

from etude.common.redact.redactor import RULES, Redactor, find_secrets
from etude.common.redact.rule import RuleGroup

ROOT = Path(__file__).parents[4]
REDACTOR = Redactor(bytes(32))


def redact(text: str) -> str:
    return REDACTOR.redact_text(text)[0]


def test_planted_secrets_of_twenty_one_formats_are_gone() -> None:
    left = Counter(
        planted.format
        for planted in plant(1_000, seed=18)
        if is_left(planted.secret, redact(planted.text))
    )
    assert len(FORMATS) == 21
    assert left.total() <= 5, left


@pytest.mark.parametrize("case", [str, str.upper])
def test_no_search_for_keywords_skips_what_a_rule_finds(case: Callable[[str], str]) -> None:
    everywhere = [
        RuleGroup(tuple(rule._replace(keywords=()) for rule in group.rules)) for group in RULES
    ]
    for planted in plant(1_000, seed=20):
        data = case(planted.text).encode()
        found, expected = find_secrets(data), find_secrets(data, everywhere)
        assert [(*each[:2], each.rule.name) for each in found] == [
            (*each[:2], each.rule.name) for each in expected
        ]


def test_at_most_one_line_of_plain_code_in_a_hundred_is_touched() -> None:
    files = [*ROOT.glob("services/*/etude/**/*.py"), *ROOT.glob("services/envserver/guest/**/*.go")]
    lines = [
        line
        for file in files
        if "redact" not in file.parts
        for line in file.read_text().splitlines()
        if line.strip()
    ]
    touched = [line for line in lines if REDACTOR.find(line.encode())]
    assert len(lines) > 10_000
    assert len(touched) <= len(lines) // 100, touched[:20]


@pytest.mark.parametrize(
    "text",
    [
        'password = get_password("db")',
        'password: str = ""',
        "password: str",
        "password: SecretStr",
        "password=password,",
        "password = user.password",
        "password: the one of your account",
        "token = request.headers['x-token']",
        'secret_name = "my-secret"',
        'api_key = os.environ["API_KEY"]',
        "DB_PASSWORD=${DB_PASSWORD}",
        "postgres://user:{password}@host/db",
        "Authorization: Bearer <token>",
        'if line == "-----BEGIN PRIVATE KEY-----":',
        "127.0.0.1:8080 and 10.0.0.1 and 192.168.1.1",
        "version 1.2.3.4 of the file",
        "std::vector<a::b::c> x;",
        "git@github.com:etude/etude.git",
        "mail jo@example.com",
        "@pytest.fixture",
        "2026-11-27T04:13:28",
        "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "4111 1111 1111 1112",
    ],
)
def test_plain_code_stays(text: str) -> None:
    assert redact(text) == text


def test_what_stands_for_a_secret_says_its_rule_and_whether_two_are_equal() -> None:
    first, second = "AKIA" + "A2B3" * 4, "AKIA" + "C4D5" * 4
    text = redact(f"{first} {first} {second}")
    a, b, c = text.split(" ")
    assert a.startswith("⟦secret:aws-access-key:")
    assert a == b != c
    other, _ = Redactor(b"\1" * 32).redact_text(first)
    assert other != a


def test_text_around_a_secret_stays_as_it_is() -> None:
    assert redact('x = 1 # "é"\npassword = "hunter2hunter2" # ok ✓').startswith('x = 1 # "é"\n')
    assert redact('password = "hunter2hunter2" # ok ✓').endswith('" # ok ✓')


def test_texts_in_any_depth_of_a_payload_are_redacted_and_nothing_else() -> None:
    payload: dict[str, JsonValue] = {
        "turn": 1,
        "ok": True,
        "none": None,
        "list": ["a", {"text": "mail to jo@corp.io"}],
    }
    found, count = REDACTOR.redact_json(payload)
    assert count == 1
    assert "jo@corp.io" not in str(found)
    assert isinstance(found, dict)
    assert {**found, "list": payload["list"]} == payload


def test_neighbours_are_each_found() -> None:
    assert "+49" not in redact("+49 151 23456789 +49 160 98765432")
    assert "142" not in redact("81.2.69.142 81.2.69.142")


@given(st.integers(0, 10_000))
def test_a_redacted_text_is_not_redacted_again(seed: int) -> None:
    for planted in plant(20, seed=seed):
        once = redact(planted.text)
        assert redact(once) == once


@given(st.text(max_size=400))
def test_any_text_is_redacted_to_a_text(text: str) -> None:
    found, count = REDACTOR.redact_text(text)
    assert (found == text) == (count == 0)


@pytest.mark.parametrize(
    "piece",
    [
        "-----BEGIN PRIVATE KEY-----\n",
        "curl -u ",
        "://a:",
        "password=",
        "Authorization: Bearer ",
        "a@",
        "eyJhbGciOi.",
        "1:",
        "+1 ",
        "4111 ",
        'password = "',
        '\\"',
        "AWS_SECRET_",
    ],
)
def test_a_text_that_repeats_the_beginning_of_a_secret_ends(piece: str) -> None:
    redact(piece * (262_144 // len(piece)))

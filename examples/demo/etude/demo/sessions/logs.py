"""Logs of a session task: few lines show the cause; the loud ones have nothing to do with it."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from random import Random

NUM_LINES = 160
_START = datetime(2024, 3, 1, 22)
_QUIET = (
    "INFO {package}.mailer: queued mail {n} to a {client}",
    "INFO {package}.web: GET /{item}s/{n} 200 in {m} ms",
    "INFO {package}.web: POST /{item}s 201 in {m} ms",
    "DEBUG {package}.cache: {m} entries, {n} hits",
    "DEBUG {package}.retries: attempt 1 of {item} {n} answered in {m} ms",
)
_LOUD = (
    "ERROR {package}.gateway: time-out after 30 s for {item} {n}, attempt 2 of 5",
    "ERROR {package}.mailer: mail {n} bounced: mailbox full",
    "WARNING {package}.settings: table of rates is 3 days old",
    "WARNING {package}.web: DeprecationWarning: parse() is old, line {m}",
    "ERROR {package}.search: index {n} is damaged, rebuilt in {m} ms",
    "WARNING disk: 8{m} of 900 GB in use",
)


def draw_logs(clues: Sequence[str], words: Mapping[str, str], random: Random) -> dict[str, str]:
    """The log of the application, and one of the gateway that shows nothing of the cause."""
    lines = [random.choice(_QUIET if random.random() < 0.85 else _LOUD) for _ in range(NUM_LINES)]
    for clue in clues:
        lines.insert(random.randrange(len(lines)), clue)
    gateway = [random.choice(_LOUD[:2]) for _ in range(NUM_LINES // 4)]
    return {
        "logs/application.log": _text(lines, words, random),
        "logs/gateway.log": _text(gateway, words, random),
    }


def _text(lines: Sequence[str], words: Mapping[str, str], random: Random) -> str:
    moment, rows = _START, []
    for line in lines:
        moment += timedelta(seconds=random.randint(1, 90))
        numbers = {"n": random.randint(1000, 9999), "m": random.randint(10, 99)}
        rows.append(f"{moment} {line.format(**words, **numbers)}\n")
    return "".join(rows)

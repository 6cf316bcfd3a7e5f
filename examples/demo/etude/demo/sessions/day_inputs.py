"""Inputs of the functions that compute with days and hours."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, timezone
from random import Random

from etude.demo.sessions.calls import Inputs, Words

_START = datetime(2024, 2, 23, tzinfo=UTC)
_OFFSETS_H = (-10, -5, 0, 1, 9)
_DAY = 24 * 60
_EVENTS = ("opened", "answered", "paid", "moved", "closed", "asked again")


def _texts(random: Random, words: Words, minutes: list[int]) -> list[str]:
    """Moments by their minute; in four of ten cases all have the site's own offset."""
    own = int(words["hours"])
    is_plain = random.random() < 0.4
    zones = [own if is_plain else random.choice(_OFFSETS_H) for _ in minutes]
    return [
        (_START + timedelta(minutes=minute))
        .astimezone(timezone(timedelta(hours=hours)))
        .isoformat()
        for minute, hours in zip(minutes, zones, strict=True)
    ]


def _moments(random: Random, words: Words, count: int, days: int = 3) -> list[str]:
    """Different moments within some days, in no order."""
    start = random.randrange(15 * _DAY)
    drawn = random.sample(range(start, start + days * _DAY), count)
    return _texts(random, words, drawn)


def _number(random: Random) -> str:
    return f"{random.randint(1000, 9999)}"


def _list(random: Random, words: Words) -> list[object]:
    return [_moments(random, words, random.randint(3, 6))]


def _placed(random: Random, words: Words) -> list[object]:
    return [*_moments(random, words, 1), random.randint(1, 9)]


def _delivered(random: Random, words: Words) -> list[object]:
    start, days = random.randrange(15 * _DAY), random.randint(1, 4)
    end = start + days * _DAY + random.randrange(-_DAY, _DAY)
    placed, delivered = _texts(random, words, [start, end])
    return [placed, days, delivered]


def _deliveries(random: Random, words: Words) -> list[object]:
    return [[[_number(random), *_delivered(random, words)] for _ in range(3)]]


def _shifts(random: Random, words: Words) -> list[object]:
    starts = [random.randrange(9 * _DAY) for _ in range(random.randint(1, 4))]
    minutes = [place for start in starts for place in (start, start + random.randint(90, 600))]
    texts = _texts(random, words, minutes)
    return [[list(pair) for pair in zip(texts[::2], texts[1::2], strict=True)]]


def _until_now(random: Random, words: Words, count: int) -> list[str]:
    """Different moments, the last of which is the latest."""
    minutes = random.sample(range(4 * _DAY), count)
    return _texts(random, words, [*minutes, 4 * _DAY + random.randrange(600)])


def _age(random: Random, words: Words) -> list[object]:
    return list(_until_now(random, words, 1))


def _oldest(random: Random, words: Words) -> list[object]:
    *placed, now = _until_now(random, words, random.randint(3, 5))
    return [[[_number(random), each] for each in placed], now, random.choice((12, 24, 36))]


def _ages(random: Random, words: Words) -> list[object]:
    *placed, now = _until_now(random, words, random.randint(2, 4))
    return [placed, now]


def _rows(random: Random, words: Words) -> list[list[str]]:
    texts = _moments(random, words, random.randint(3, 5))
    return [[_number(random), text] for text in texts]


def _export(random: Random, words: Words) -> list[object]:
    return [_rows(random, words)]


def _between(random: Random, words: Words) -> list[object]:
    rows = _rows(random, words)
    days = sorted(text[:10] for _, text in rows)
    return [rows, days[0], days[len(days) // 2]]


def _week(random: Random, words: Words) -> list[object]:
    *texts, now = _moments(random, words, random.randint(4, 6), days=6)
    return [texts, now]


def _stay(random: Random, words: Words) -> list[object]:
    start = random.randrange(9 * _DAY)
    return list(_texts(random, words, [start, start + random.randint(_DAY // 2, 4 * _DAY)]))


def _stays(random: Random, words: Words) -> list[object]:
    names = random.sample(("Ada", "Bo", "Cem", "Dora", "Eli"), 3)
    return [[[name, *_stay(random, words)] for name in names]]


def _present(random: Random, words: Words) -> list[object]:
    start = random.randrange(9 * _DAY)
    minutes = [start + random.randint(-2 * _DAY, 2 * _DAY) for _ in range(6)]
    texts = _texts(random, words, minutes)
    pairs = zip(minutes[::2], texts[::2], minutes[1::2], texts[1::2], strict=True)
    stays = [sorted([(one, first), (other, last)]) for one, first, other, last in pairs]
    day = (_START + timedelta(minutes=start)).date().isoformat()
    return [[[f"guest {n}", *(text for _, text in stay)] for n, stay in enumerate(stays)], day]


def _due(random: Random, words: Words) -> list[object]:
    rows = _rows(random, words)
    start = datetime.fromisoformat(random.choice(rows)[1]) - _START
    return [rows, *_texts(random, words, [int(start.total_seconds() // 60) + 90])]


def _reminder(random: Random, words: Words) -> list[object]:
    return [*_moments(random, words, 1), random.choice((2, 12, 24, 48))]


def _events(random: Random, words: Words) -> list[object]:
    texts = _moments(random, words, random.randint(3, 5), days=1)
    return [[[text, random.choice(_EVENTS)] for text in texts]]


def _visit(random: Random, words: Words) -> list[object]:
    return list(_moments(random, words, 1))


INPUTS: Mapping[str, Mapping[str, Inputs]] = {
    "reports": {"{item}s_by_day": _list, "busiest_day": _list},
    "deadlines": {
        "{item}_deadline": _placed,
        "is_late": _delivered,
        "late_{item}s": _deliveries,
    },
    "shifts": {"worked_minutes": _shifts, "night_shifts": _shifts},
    "ages": {"{item}_age": _age, "oldest_{item}s": _oldest, "mean_age": _ages},
    "exports": {"{item}_export": _export, "{item}s_between": _between},
    "weeks": {"{item}s_by_week": _list, "this_week": _week, "weekend_{item}s": _list},
    "reminders": {"due_today": _due, "reminder_at": _reminder},
    "histories": {
        "{item}_history": _events,
        "last_change": _events,
        "longest_pause": _events,
    },
    "stays": {"nights": _stay, "{client}s_present": _present, "last_to_leave": _stays},
    "visits": {
        "is_open": _visit,
        "visits_when_closed": _export,
        "visits_by_hour": _list,
    },
}

"""Families of session tasks: one cause, the modules that it shows in, and who complains of what."""

from collections.abc import Mapping
from random import Random
from typing import NamedTuple

from etude.demo.sessions import day_inputs, money_inputs
from etude.demo.sessions.calls import Inputs

PACKAGES = ("depot", "studio", "garage", "lending", "lab", "workshop")
ITEMS = ("purchase", "booking", "parcel", "repair", "rental", "ticket")
CLIENTS = ("member", "guest", "buyer", "partner", "tenant", "visitor")

_OPENINGS = (
    "{symptom}. We patched that spot twice and it comes back elsewhere. Find out where it really"
    " comes from and fix it for good, in every module. Rules are in docs/, last night's logs in"
    " logs/.",
    "Hey, {symptom}?? the tests are green so don't trust them. finance says it's not the only"
    " place. please sort it out properly, everything has to agree with docs/. logs attached in"
    " logs/",
    "Support ticket: {symptom}. I doubt that it's only there. Can you track it down (logs/ might"
    " help) and make the whole package do what docs/ says?",
    "{symptom}. Not sure if it's related to the errors in logs/. Must be right everywhere by"
    " tomorrow, see docs/ for what right means.",
)


class Family(NamedTuple):
    """One kind of cause with everything that tasks are drawn from."""

    name: str
    cause: str
    """Module of the cause, without .py."""
    symptoms: Mapping[str, str]
    """By module that the cause shows in: a user's complaint, with the words' slots."""
    inputs: Mapping[str, Mapping[str, Inputs]]
    """By module and function: what it is called with; slots in the functions' names."""
    clues: tuple[str, ...]
    """Lines of the log that show the cause."""
    explanation: str
    """Cause and change, for those who judge an answer."""
    settings: tuple[Mapping[str, str], ...]
    """Values of the family's own slots, one of which a task has."""


MONEY = Family(
    name="money",
    cause="amounts",
    symptoms={
        "invoices": "gross on some {item} invoices isn't net plus tax",
        "discounts": "a discounted {item} costs a cent less than our price list says",
        "splits": "when {client}s split a {item} the shares don't add up",
        "statements": "the closing balance on a {client}'s statement is off by a cent",
        "refunds": "the {item} refund of one {client} is a cent short",
        "exports": "the bank rejects our {item} export, sums differ from the invoices",
        "currencies": "converted {item} prices are off by a cent against the bank",
        "deliveries": "a {client} with exactly {limit} in the basket had to pay for delivery",
        "points": "a {client} is missing points",
        "budgets": "a {client} who spent exactly the budget is shown as over it",
    },
    inputs=money_inputs.INPUTS,
    clues=(
        "DEBUG {package}.amounts: parsed 1.005 as 1.00499999999999989",
        "DEBUG {package}.amounts: sum of 0.10 0.20 is 0.30000000000000004",
        "WARNING {package}.amounts: 2.675 shown as 2.67",
    ),
    explanation=(
        "Amounts are binary fractions from the moment that amounts.parse reads them, so that sums"
        " are not exact and half a cent falls either way. Whole cents in amounts.py, rounding in"
        " one place there, and every module that computes with amounts on top of it. Rounding in"
        " the module that the user names leaves all others wrong."
    ),
    settings=tuple(
        {"rate": rate, "fee": fee, "limit": limit}
        for rate in ("7.5", "12.5", "5", "15")
        for fee in ("1.5", "2.5")
        for limit in ("59.90", "49.70", "99.80")
    ),
)
DAYS = Family(
    name="days",
    cause="clock",
    symptoms={
        "reports": "the daily {item} report counts late {item}s on the wrong day",
        "deadlines": "a {client} was told a {item} is late that came in time",
        "shifts": "night shifts of the travelling staff are paid wrong",
        "ages": "the list of oldest {item}s is in the wrong order, some are hours off",
        "exports": "auditors say days in our {item} export are not those of the site",
        "weeks": "Sunday evening {item}s end up in the wrong week",
        "reminders": "a {client} got the reminder for a {item} a day late",
        "histories": "the history of a {item} shows the answer before the question",
        "stays": "a {client} was billed a night too many",
        "visits": "visits are listed as outside of opening times that weren't",
    },
    inputs=day_inputs.INPUTS,
    clues=(
        "DEBUG {package}.clock: parsed 2024-03-01T23:30:00-05:00 as 2024-03-01T23:30:00",
        "DEBUG {package}.clock: 2024-03-02T04:30:00+00:00 is after 2024-03-01T23:30:00-05:00",
        "DEBUG {package}.clock: 2024-03-03T00:10:00+09:00 is a Sunday",
    ),
    explanation=(
        "clock.parse drops the offset of a moment, and modules cut days and hours out of the text."
        " Moments with their offset, in the time of the site, come from clock.py, and every module"
        " takes days, weeks, hours and differences from there. Converting in the module that the"
        " user names leaves all others wrong."
    ),
    settings=tuple(
        {"hours": f"{hours}", "offset": f"{hours:+03}:00", "opens": opens, "closes": closes}
        for hours in (-5, 1, 9)
        for opens, closes in (("7", "19"), ("8", "18"), ("9", "22"))
    ),
)
FAMILIES = (MONEY, DAYS)


def draw_words(family: Family, random: Random) -> dict[str, str]:
    """The words of one task by slot."""
    return {
        "package": random.choice(PACKAGES),
        "item": random.choice(ITEMS),
        "client": random.choice(CLIENTS),
        **random.choice(family.settings),
    }


def draw_request(family: Family, module: str, words: Mapping[str, str], random: Random) -> str:
    """What the user writes: the symptom in one module and little else."""
    symptom = family.symptoms[module].format_map(words)
    text = random.choice(_OPENINGS).format(symptom=symptom)
    return text[:1].upper() + text[1:]

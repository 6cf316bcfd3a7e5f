"""Inputs of the functions that compute with money."""

from collections.abc import Mapping
from random import Random

from etude.demo.sessions.calls import Inputs, Words

_RATES = ("2.5", "5", "7.5", "10", "12.5", "15", "25")
_EXCHANGE = ("1.085", "0.925", "1.5", "7.455", "0.855")


def _text(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02}"


def _cents(random: Random) -> int:
    # Multiples of ten make halves of a cent under most rates.
    return random.randint(1, 2_000) * random.choice((1, 10))


def _amount(random: Random) -> str:
    return _text(_cents(random))


def _amounts(random: Random, least: int = 1) -> list[str]:
    return [_amount(random) for _ in range(random.randint(least, 4))]


def _parts(total: int, random: Random) -> list[str]:
    """Amounts that add up."""
    cuts = sorted(random.sample(range(1, total), random.randint(1, 3)))
    return [_text(end - start) for start, end in zip([0, *cuts], [*cuts, total], strict=True)]


def _invoice_lines(random: Random) -> list[object]:
    return [[amount, random.randint(1, 4)] for amount in _amounts(random)]


def _invoice(random: Random, _: Words) -> list[object]:
    return [_invoice_lines(random)]


def _deposit(random: Random, _: Words) -> list[object]:
    return [_invoice_lines(random), random.choice(_RATES)]


def _discount(random: Random, _: Words) -> list[object]:
    return [_amount(random), random.choice(_RATES)]


def _best_discount(random: Random, _: Words) -> list[object]:
    return [_amount(random), random.sample(_RATES, 2), _amount(random)]


def _split(random: Random, _: Words) -> list[object]:
    return [_amount(random), random.randint(2, 7)]


def _instalments(random: Random, _: Words) -> list[object]:
    return [_amount(random), random.randint(2, 6), random.choice(_RATES)]


def _statement(random: Random, _: Words) -> list[object]:
    kinds = ("charge", "charge", "charge", "refund")
    return [[[random.choice(kinds), amount] for amount in _amounts(random, 2)]]


def _settled(random: Random, _: Words) -> list[object]:
    total = 3 + _cents(random)
    return [_parts(total, random), _parts(total + (random.random() < 0.3), random)]


def _refund(random: Random, _: Words) -> list[object]:
    total = random.choice((7, 8, 16, 28, 30))
    return [_amount(random), random.randint(1, total - 1), total]


def _cancellation(random: Random, _: Words) -> list[object]:
    first, second = sorted(random.sample(_RATES, 2), key=float)
    return [_amount(random), random.randint(0, 40), [[30, first], [7, second]]]


def _export(random: Random, _: Words) -> list[object]:
    return [[[f"{random.randint(1000, 9999)}", amount] for amount in _amounts(random)]]


def _read_export(random: Random, _: Words) -> list[object]:
    rows = [(random.randint(1000, 9999), _cents(random)) for _ in range(random.randint(1, 4))]
    total = sum(cents for _, cents in rows)
    return [[*(f"{number};{cents}" for number, cents in rows), f"{len(rows)};{total}"]]


def _conversion(random: Random, _: Words) -> list[object]:
    return [_amount(random), random.choice(_EXCHANGE)]


def _currencies(random: Random, _: Words) -> list[object]:
    names = random.sample(("EUR", "USD", "DKK", "CHF"), 2)
    rates = {name: [random.choice(_EXCHANGE), random.choice(_RATES)] for name in names}
    return [_amounts(random), rates]


def _basket(random: Random, words: Words) -> list[str]:
    limit = int(words["limit"].replace(".", ""))
    return _parts(limit + random.choice((0, 0, -1, 1, -500)), random)


def _delivery(random: Random, words: Words) -> list[object]:
    return [_basket(random, words), _amount(random)]


def _left(random: Random, words: Words) -> list[object]:
    return [_basket(random, words)]


def _points(random: Random, _: Words) -> list[object]:
    return [_amounts(random)]


def _spend(random: Random, _: Words) -> list[object]:
    points = random.randint(1, 300)
    return [_text(10 * points + random.choice((0, 0, 5, -37, 40))), points]


def _budget(random: Random, _: Words) -> list[object]:
    total = 10 + _cents(random)
    return [_text(total), _parts(total + random.choice((0, 0, -2, 7)), random)]


def _shares(random: Random, _: Words) -> list[object]:
    return [_amount(random), [random.randint(1, 5) for _ in range(random.randint(2, 4))]]


INPUTS: Mapping[str, Mapping[str, Inputs]] = {
    "invoices": {"{item}_invoice": _invoice, "{item}_deposit": _deposit},
    "discounts": {"{item}_discount": _discount, "best_{item}_discount": _best_discount},
    "splits": {"split_{item}": _split, "{item}_instalments": _instalments},
    "statements": {"{client}_statement": _statement, "is_settled": _settled},
    "refunds": {"{item}_refund": _refund, "{item}_cancellation": _cancellation},
    "exports": {"{item}_export": _export, "read_{item}_export": _read_export},
    "currencies": {"convert_{item}": _conversion, "{item}_in_currencies": _currencies},
    "deliveries": {"{item}_delivery": _delivery, "left_for_free_delivery": _left},
    "budgets": {"{client}_budget": _budget, "share_budget": _shares},
    "points": {"{client}_points": _points, "spend_points": _spend},
}

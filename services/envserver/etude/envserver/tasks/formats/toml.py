"""Tables as TOML text, which the standard library only reads."""

import re
from collections.abc import Mapping
from datetime import date, time

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def write_toml(table: Mapping[str, object]) -> str:
    """The text of a document: plain keys first, then a section for each table.

    Raises:
        TypeError: a value is none of TOML's.
    """
    plain = {k: v for k, v in table.items() if not isinstance(v, Mapping)}
    lines = [f"{_key(name)} = {_value(value)}" for name, value in plain.items()]
    for name, value in table.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{_key(name)}]"]
            lines += [f"{_key(inner)} = {_value(each)}" for inner, each in value.items()]
    return "\n".join(lines).lstrip("\n") + "\n"


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _text(value)
        case int() | float():
            return str(value)
        case date() | time():
            return value.isoformat()
        case Mapping():
            return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(_value(each) for each in value) + "]"
        case _:
            raise TypeError(f"{type(value).__name__} is no value of TOML")


def _text(text: str) -> str:
    return '"' + "".join(_letter(letter) for letter in text) + '"'


def _letter(letter: str) -> str:
    if letter in {'"', "\\"}:
        return f"\\{letter}"
    return letter if letter >= " " and letter != "\x7f" else f"\\u{ord(letter):04x}"

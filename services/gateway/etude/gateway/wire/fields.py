"""Fields of a client's JSON, read with their places in errors."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from etude.agent.tool_calls import read_json
from etude.common.errors import InvalidFieldError

MAX_MESSAGES = 10_000
MAX_TOOLS = 512


def read_body(data: bytes) -> Mapping[str, Any]:
    """Read the JSON object of a request.

    Raises:
        InvalidFieldError: it is none.
    """
    try:
        body = read_json(data.decode())
    except ValueError as error:
        raise InvalidFieldError("body", f"is {error}") from error
    if not isinstance(body, dict):
        raise InvalidFieldError("body", "is no JSON object")
    return body


def refuse(field: str, what: str) -> NoReturn:
    """Refuse one field.

    Raises:
        InvalidFieldError: always.
    """
    raise InvalidFieldError(field, what)


def read_text(body: Mapping[str, Any], field: str, default: str | None = None) -> str:
    """Read a text; without a default it is required.

    Raises:
        InvalidFieldError: it is missing, or no text.
    """
    value = body.get(field)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        refuse(field, "is missing" if value is None else "is no text")
    return value


def read_flag(body: Mapping[str, Any], field: str, *, default: bool = False) -> bool:
    """Read true or false.

    Raises:
        InvalidFieldError: it is neither.
    """
    value = body.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        refuse(field, "is neither true nor false")
    return value


def read_count(body: Mapping[str, Any], field: str, *, low: int, high: int) -> int | None:
    """Read a whole number within limits; None if it is missing.

    Raises:
        InvalidFieldError: it is no such number.
    """
    value = body.get(field)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        refuse(field, f"is no whole number from {low} to {high}")
    return value


def read_number(body: Mapping[str, Any], field: str, default: float, *, high: float) -> float:
    """Read a number from 0 to a limit.

    Raises:
        InvalidFieldError: it is no such number.
    """
    value = body.get(field)
    if value is None:
        return default
    if type(value) not in {int, float} or not math.isfinite(value) or not 0 <= value <= high:
        refuse(field, f"is no number from 0 to {high:g}")
    return float(value)


def read_list(
    body: Mapping[str, Any], field: str, *, most: int, is_required: bool = False
) -> Sequence[Any]:
    """Read a list.

    Raises:
        InvalidFieldError: it is none, is missing, or has too many items.
    """
    value = body.get(field)
    if value is None and not is_required:
        return ()
    if not isinstance(value, list) or len(value) > most:
        refuse(field, f"is no list of at most {most}")
    return value


def read_object(value: object, field: str) -> Mapping[str, Any]:
    """Read an object.

    Raises:
        InvalidFieldError: it is none.
    """
    if not isinstance(value, dict):
        refuse(field, "is no object")
    return value


def read_arguments(text: object, field: str) -> Mapping[str, object]:
    """Read the arguments of a call: the JSON text of an object.

    Raises:
        InvalidFieldError: they are none.
    """
    if not isinstance(text, str):
        refuse(field, "is no JSON text")
    try:
        value = read_json(text or "{}")
    except ValueError as error:
        raise InvalidFieldError(field, f"is {error}") from error
    return read_object(value, field)


def refuse_unsupported(body: Mapping[str, Any], neutral: Mapping[str, Sequence[object]]) -> None:
    """Refuse fields that would change the answer, and that no engine carries out.

    Args:
        body: of the request.
        neutral: by field the values that ask for nothing; null always does not.

    Raises:
        InvalidFieldError: names the first such field.
    """
    for field, values in neutral.items():
        value = body.get(field)
        if value is not None and value not in values:
            refuse(field, "is not supported")

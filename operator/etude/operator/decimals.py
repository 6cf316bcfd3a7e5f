"""Figures that are told as text: of a checkpoint, of a step."""

import math
from contextlib import suppress


def value_of(text: str) -> float | None:
    """What a text says, None where that is no finite number."""
    with suppress(ValueError):
        value = float(text)
        return value if math.isfinite(value) else None
    return None

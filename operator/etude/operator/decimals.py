"""Numbers in text: metrics of checkpoints and steps."""

import math
from contextlib import suppress


def value_of(text: str) -> float | None:
    """The number in a text; None if it is not a finite number."""
    with suppress(ValueError):
        value = float(text)
        return value if math.isfinite(value) else None
    return None

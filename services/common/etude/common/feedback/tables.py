"""Places of the tables of figures that a feedback service writes for questions.

tables/<name>/<day>/<number:06d>.parquet     a part; days in UTC, such as 2026-11-27
"""

import re
from typing import NamedTuple, Self

PREFIX = "tables/"
_KEY = re.compile(
    re.escape(PREFIX) + r"([a-z_]{1,32})/([0-9]{4}-[0-9]{2}-[0-9]{2})/([0-9]{6})\.parquet"
)


class PartPlace(NamedTuple):
    """Place of a part; places of one table are ordered as its rows."""

    table: str
    day: str
    number: int = 1

    @property
    def key(self) -> str:
        return f"{PREFIX}{self.table}/{self.day}/{self.number:06d}.parquet"

    @classmethod
    def parse(cls, key: str) -> Self | None:
        """Parse a key; None for one of another object."""
        found = _KEY.fullmatch(key)
        return None if found is None else cls(found[1], found[2], int(found[3]))

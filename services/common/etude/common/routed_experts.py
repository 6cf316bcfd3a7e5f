"""Recorded experts of tokens, and their messages.

Shapes: P consecutive tokens of one context, M layers with experts, k choices of a token.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from etude.common.errors import InvalidFieldError
from etude.v1 import routes_pb2

ExpertIds = NDArray[Any]
"""Ids of experts, uint8 or uint16; the largest value was not recorded. [P, M, k]"""

ROUTES = "routes/"
"""Prefix of the objects of finished rollouts in the run's store."""
CHUNK_BYTES = 1 << 20
"""Bytes of ids in one message of a stream."""
MAX_LAYERS, MAX_CHOICES = 1_024, 64
"""Of a message."""
MAX_ROW_BYTES = 4_096
"""Of one token: 128 layers with 16 choices of two bytes."""


class RouteRows(NamedTuple):
    """Experts of the tokens from a position on."""

    start: int
    ids: ExpertIds

    @property
    def end(self) -> int:
        """Position behind the last of them."""
        return self.start + len(self.ids)

    @classmethod
    def read(cls, message: routes_pb2.RoutedExperts) -> Self:
        """Read a message, which may come from anywhere.

        Raises:
            InvalidFieldError: a field is out of range, or ids are missing or too many.
        """
        for name, value, most in (
            ("layers", message.layers, MAX_LAYERS),
            ("choices", message.choices, MAX_CHOICES),
            ("id_bytes", message.id_bytes, 2),
        ):
            if not 1 <= value <= most:
                raise InvalidFieldError(f"routes.{name}", f"{value} is not from 1 to {most}")
        if message.start < 0:
            raise InvalidFieldError("routes.start", f"{message.start} is negative")
        row_bytes = message.layers * message.choices * message.id_bytes
        if row_bytes > MAX_ROW_BYTES:
            raise InvalidFieldError(
                "routes.layers", f"{row_bytes} bytes a token; {MAX_ROW_BYTES} are the limit"
            )
        if len(message.ids) % row_bytes:
            raise InvalidFieldError(
                "routes.ids", f"{len(message.ids)} bytes are no multiple of {row_bytes}"
            )
        dtype = np.dtype("u1" if message.id_bytes == 1 else "<u2")
        ids: ExpertIds = np.frombuffer(message.ids, dtype)
        return cls(message.start, ids.reshape(-1, message.layers, message.choices))

    def message(self) -> routes_pb2.RoutedExperts:
        """All rows as one message."""
        width = self.ids.dtype.itemsize
        return routes_pb2.RoutedExperts(
            start=self.start,
            layers=self.ids.shape[1],
            choices=self.ids.shape[2],
            id_bytes=width,
            ids=self.ids.astype(f"<u{width}", copy=False).tobytes(),
        )

    def chunks(self) -> Iterator[routes_pb2.RoutedExperts]:
        """The rows as messages of bounded size."""
        row_bytes = max(1, self.ids[:1].nbytes)
        size = max(1, CHUNK_BYTES // row_bytes)
        for first in range(0, len(self.ids), size):
            yield RouteRows(self.start + first, self.ids[first : first + size]).message()


class RouteDraft:
    """Experts of consecutive tokens so far; rows that are there stay."""

    def __init__(self, start: int = 0) -> None:
        """Begin without rows, at a position of the context."""
        self.start = start
        self.end = start
        """Position behind the last row."""
        self._parts: list[ExpertIds] = []

    def add(self, rows: RouteRows) -> None:
        """Add rows behind those that are there; tokens between have none.

        Raises:
            InvalidFieldError: they are of another model than the rows before.
        """
        if self._parts:
            first = self._parts[0]
            if (rows.ids.shape[1:], rows.ids.dtype) != (first.shape[1:], first.dtype):
                raise InvalidFieldError(
                    "routes",
                    f"{rows.ids.shape[1:]} of {rows.ids.dtype} a token, before it were"
                    f" {first.shape[1:]} of {first.dtype}",
                )
        if rows.end <= self.end:
            return
        if rows.start > self.end:
            self._parts.append(missing_rows(rows.start - self.end, like=rows.ids))
            self.end = rows.start
        self._parts.append(rows.ids[self.end - rows.start :])
        self.end = rows.end

    def cut(self, end: int) -> None:
        """Remove the rows from a position on."""
        rows = self.rows()
        if rows is None or rows.end <= end:
            return
        kept = rows.ids[: max(0, end - self.start)]
        self._parts, self.end = [kept], self.start + len(kept)

    def rows(self) -> RouteRows | None:
        """All rows; None without any."""
        return RouteRows(self.start, np.concatenate(self._parts)) if self._parts else None

    def pad_to(self, end: int) -> RouteRows | None:
        """All rows, with missing ones up to a position behind them; None without any."""
        rows = self.rows()
        if rows is None or rows.end >= end:
            return rows
        missing = missing_rows(end - rows.end, like=rows.ids)
        return rows._replace(ids=np.concatenate([rows.ids, missing]))


def missing_rows(length: int, *, like: ExpertIds) -> ExpertIds:
    """Rows of tokens whose experts were not recorded. [P, M, k]."""
    rows: ExpertIds = np.full((length, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)
    return rows

"""Best-fit packing of sequences into rows of a fixed capacity."""

import bisect
from collections.abc import Sequence


def pack_best_fit(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Pack sequences into rows, longest first, each into the fullest row that still has room.

    Args:
        lengths: tokens of each sequence, each at most the capacity.
        capacity: tokens of a row.

    Returns:
        Indices of the sequences of each row.

    Raises:
        ValueError: a sequence is longer than a row.

    Source: best-fit decreasing needs at most 11/9 of the fewest rows plus one (Johnson 1973,
    https://doi.org/10.1016/S0022-0000(74)80026-7).
    """
    rows: list[list[int]] = []
    # (room, row), sorted by room: the first entry with enough room is the best fit.
    rooms: list[tuple[int, int]] = []
    for index in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"sequence {index} has {length} tokens, a row holds {capacity}")
        at = bisect.bisect_left(rooms, (length, -1))
        if at == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room, row = rooms.pop(at)
        rows[row].append(index)
        if room > length:
            bisect.insort(rooms, (room - length, row))
    return rows


def fill_ratio(rows: Sequence[Sequence[int]], lengths: Sequence[int], *, capacity: int) -> float:
    """Share of the rows' capacity that holds tokens; 1 for no rows."""
    if not rows:
        return 1.0
    return sum(lengths[index] for row in rows for index in row) / (capacity * len(rows))

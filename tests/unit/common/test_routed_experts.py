"""Messages of recorded experts: any size travels in bounded pieces, and bad ones are refused."""

import numpy as np
import pytest

from etude.common.errors import InvalidFieldError
from etude.common.routed_experts import CHUNK_BYTES, ExpertIds, RouteDraft, RouteRows
from etude.v1 import routes_pb2


def rows(start: int, length: int, *, dtype: type = np.uint8, layers: int = 2) -> RouteRows:
    draw = np.random.default_rng(start)
    ids: ExpertIds = draw.integers(0, 200, (length, layers, 2)).astype(dtype)
    return RouteRows(start, ids)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_rows_of_a_long_prompt_travel_in_bounded_messages(dtype: type) -> None:
    given = rows(7, 100_000, dtype=dtype, layers=16)
    draft = RouteDraft(7)
    parts = list(given.chunks())
    assert len(parts) > 2
    for part in parts:
        assert len(part.ids) <= CHUNK_BYTES
        draft.add(RouteRows.read(routes_pb2.RoutedExperts.FromString(part.SerializeToString())))
    found = draft.rows()
    assert found is not None
    assert found.start == 7
    assert found.ids.dtype == dtype
    assert (found.ids == given.ids).all()


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("layers", {"layers": 0}),
        ("layers", {"layers": 1 << 20}),
        ("layers", {"layers": 1_000, "choices": 8}),
        ("choices", {"choices": -1}),
        ("choices", {"choices": 65}),
        ("id_bytes", {"id_bytes": 4}),
        ("start", {"start": -1}),
        ("ids", {"ids": b"123"}),
    ],
)
def test_a_message_with_impossible_sizes_is_refused_by_field(
    field: str, change: dict[str, object]
) -> None:
    message = rows(0, 3).message()
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(InvalidFieldError, match=rf"routes\.{field}"):
        RouteRows.read(message)


def test_rows_that_are_there_stay_and_gaps_are_missing() -> None:
    draft, first, later = RouteDraft(), rows(0, 4), rows(2, 5)
    draft.add(first)
    draft.add(later)
    draft.add(rows(9, 2))
    found = draft.pad_to(13)
    assert found is not None
    assert (found.ids[:4] == first.ids).all()
    assert (found.ids[4:7] == later.ids[2:]).all()
    assert (found.ids[7:9] == 255).all()
    assert (found.ids[11:] == 255).all()
    assert len(found.ids) == 13


def test_rows_behind_a_cut_are_gone() -> None:
    draft, given = RouteDraft(3), rows(3, 6)
    draft.add(given)
    draft.cut(20)
    assert draft.end == 9
    draft.cut(5)
    found = draft.rows()
    assert draft.end == 5
    assert found is not None
    assert (found.ids == given.ids[:2]).all()


def test_rows_of_another_model_are_refused() -> None:
    draft = RouteDraft()
    draft.add(rows(0, 2))
    for other in (rows(2, 1, layers=3), rows(2, 1, dtype=np.uint16)):
        with pytest.raises(InvalidFieldError, match="before it were"):
            draft.add(other)

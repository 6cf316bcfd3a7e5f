"""Feedback events: closed types, read from bytes that may be anything."""

import contextlib
import copy
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.feedback import events as examples

from etude.common.errors import InvalidFieldError
from etude.common.feedback import events


@pytest.mark.parametrize("kind", events.EVENTS)
def test_an_event_of_each_kind_is_read_and_written_without_loss(kind: str) -> None:
    event = events.parse_event(examples.encoded(kind))
    assert event.kind == kind
    assert events.parse_event(event.model_dump_json().encode()) == event


@pytest.mark.parametrize("kind", events.EVENTS)
def test_the_published_schema_takes_what_the_service_takes(kind: str) -> None:
    schema = events.json_schema(kind)
    jsonschema.validate(examples.event(kind), schema)
    for place in places(examples.event(kind)):
        broken = examples.event(kind)
        at(broken, place)["surprise"] = 1
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema)


def places(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all objects in an event."""
    yield path
    for name, item in value.items():
        if isinstance(item, dict):
            yield from places(item, (*path, name))


def at(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = value[name]
    return value


@pytest.mark.parametrize("place", list(places(examples.event("shown"))))
def test_an_unknown_field_is_refused_by_its_name_wherever_it_is(place: tuple[str, ...]) -> None:
    broken = examples.event("shown")
    at(broken, place)["surprise"] = 1
    with pytest.raises(InvalidFieldError, match="surprise"):
        events.parse_event(json.dumps(broken).encode())


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("specversion",), "0.3", "specversion"),
        (("type",), "dev.etude.feedback.shown.v2", "type"),
        (("type",), "dev.etude.feedback..v1", "type"),
        (("type",), 7, "type"),
        (("id",), "", "id"),
        (("id",), "a b", "id"),
        (("time",), 1700000000, "time"),
        (("time",), "2026-11-02T08:00:00", "time"),
        (("data", "user"), "jo@corp.io", "user"),
        (("data", "consent", "granted"), "true", "granted"),
        (("data", "consent", "granted"), 1, "granted"),
        (("data", "payload", "turn"), -1, "turn"),
        (("data", "payload", "turn"), "1", "turn"),
        (("data", "payload", "turn"), 1e300, "turn"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(
    path: tuple[str, ...], value: object, field: str
) -> None:
    broken = examples.event("shown")
    at(broken, path[:-1])[path[-1]] = value
    with pytest.raises(InvalidFieldError) as refused:
        events.parse_event(json.dumps(broken).encode())
    assert field in refused.value.field


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"[" * 200_000,
        b'{"type":' * 20_000,
        b'{"type": NaN}',
        b'{"type": "dev.etude.feedback.shown.v1\xff"}',
        b'{"type": "\\ud800"}',
        b"\x00" * 1_000,
        b"9" * 100_000,
    ],
)
def test_what_is_no_event_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidFieldError):
        events.parse_event(data)


@given(data=st.binary(max_size=300))
def test_no_bytes_are_more_than_refused(data: bytes) -> None:
    with pytest.raises(InvalidFieldError):
        events.parse_event(data)


@given(kind=st.sampled_from(sorted(events.EVENTS)), data=st.data())
def test_a_damaged_event_is_read_or_refused(kind: str, data: st.DataObject) -> None:
    raw = bytearray(examples.encoded(kind))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(InvalidFieldError):
        events.parse_event(bytes(raw))


def test_a_refusal_does_not_repeat_what_it_refuses() -> None:
    broken = copy.deepcopy(examples.event("followup"))
    broken["data"]["user"] = "my secret @"
    with pytest.raises(InvalidFieldError) as refused:
        events.parse_event(json.dumps(broken).encode())
    assert "my secret" not in str(refused.value)


def test_a_batch_is_split_into_its_events() -> None:
    batch = [examples.event(kind) for kind in events.EVENTS]
    items = events.split_batch(json.dumps(batch).encode())
    assert [json.loads(item) for item in items] == batch


@pytest.mark.parametrize("data", [b"{}", b"", b"[" * 100_000, json.dumps([1] * 1_001).encode()])
def test_what_is_no_batch_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidFieldError, match="batch"):
        events.split_batch(data)

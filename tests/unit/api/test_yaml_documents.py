"""YAML is read as kubectl reads it, with positions."""

from typing import Any

import pytest

from etude.common.api.yaml_documents import (
    FilePosition,
    InvalidYamlError,
    dump_documents,
    parse_documents,
)


def value(text: str) -> Any:
    (document,) = parse_documents(text.encode())
    return document.value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3e-3", 0.003),
        ("1e3", 1000),
        ("5.0", 5),
        ("1_000", 1000),
        ("017", 15),
        ("0o17", 15),
        ("089", 89),
        ("0x1F", 31),
        ("0b11", 3),
        ("-5", -5),
        ("yes", True),
        ("Off", False),
        ("y", True),
        ("~", None),
        ("0b_", "0b_"),
        ("0x_", "0x_"),
        ("0o_", "0o_"),
        ("-0b_", "-0b_"),
        (".", "."),
        ("._", "._"),
        ("._5", "._5"),
        ("-._5", -0.5),
        (".5", 0.5),
        ("0_", 0),
        ("1e999", "1e999"),
        ("9" * 5_000, "9" * 5_000),
        ("0x" + "f" * 17, "0x" + "f" * 17),
        ("18446744073709551615", 2**64 - 1),
        ("18446744073709551616", float(2**64)),
        ("2024-01-01", "2024-01-01"),
        ("1:20", "1:20"),
        ("'5'", "5"),
        ("nothing", "nothing"),
    ],
)
def test_a_scalar_is_what_go_makes_of_it(text: str, expected: object) -> None:
    read_back = value(f"a: {text}")
    assert read_back == {"a": expected}
    assert type(read_back["a"]) is type(expected)


def test_a_key_that_looks_like_a_number_but_is_none_stays_text() -> None:
    assert value("0x_: 1") == {"0x_": 1}


def test_a_number_that_json_does_not_have_is_a_problem() -> None:
    (document,) = parse_documents(b"a: -.inf")
    assert "no number that JSON has" in document.problems[0].what


def test_every_value_and_key_has_its_position() -> None:
    (document,) = parse_documents(b"spec:\n  phases:\n  - name: sft\n    type: [a, b]\n")
    assert document.key_position(("spec", "phases", 0, "name")) == FilePosition(3, 5)
    assert document.value_position(("spec", "phases", 0, "name")) == FilePosition(3, 11)
    assert document.value_position(("spec", "phases", 0, "type", 1)) == FilePosition(4, 15)


def test_a_field_that_is_missing_stands_where_its_owner_starts() -> None:
    (document,) = parse_documents(b"spec:\n  model: {}\n")
    assert document.value_position(("spec", "model", "uri")) == FilePosition(2, 10)


def test_documents_are_separate_and_empty_ones_are_left_out() -> None:
    assert [
        document.value
        for document in parse_documents(b"a: 1\n---\n---\n# only a comment\n---\nb: 2")
    ] == [
        {"a": 1},
        {"b": 2},
    ]


def test_anchors_and_merge_keys_are_resolved() -> None:
    assert value("x: &x {d: 1, e: 1}\nz: {<<: *x, e: 2}") == {
        "x": {"d": 1, "e": 1},
        "z": {"d": 1, "e": 2},
    }


def test_a_key_given_twice_is_a_problem() -> None:
    (document,) = parse_documents(b"a: 1\na: 2\n")
    assert [problem.position for problem in document.problems] == [FilePosition(2, 1)]


def test_infinity_is_a_problem_because_json_has_none() -> None:
    (document,) = parse_documents(b"a: .inf")
    assert "no number that JSON has" in document.problems[0].what


@pytest.mark.parametrize(
    ("data", "position"),
    [
        (b"a: [", FilePosition(1, 5)),
        (b"a: 1\nb:\n\t- x", FilePosition(3, 1)),
        (b"a: b: c", FilePosition(1, 5)),
        (b"a: *q", FilePosition(1, 4)),
        (b"\xff", FilePosition(1, 1)),
        (b"a: \x00", FilePosition(1, 1)),
        (b"[" * 5000, FilePosition(1, 1)),
        (b"a" * (3 * 1024 * 1024 + 1), FilePosition(1, 1)),
    ],
)
def test_what_is_no_yaml_is_refused_at_its_place(data: bytes, position: FilePosition) -> None:
    with pytest.raises(InvalidYamlError) as caught:
        parse_documents(data)
    assert caught.value.problem.position == position


def test_an_alias_to_its_own_parent_is_a_problem_and_no_endless_loop() -> None:
    (document,) = parse_documents(b"a: &a [*a]")
    assert "contains itself" in document.problems[0].what


def test_a_small_file_that_stands_for_billions_of_values_is_a_problem() -> None:
    levels = "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
    (document,) = parse_documents(f"a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n{levels}".encode())
    assert [problem.what for problem in document.problems] == ["more than 200000 values"]


@pytest.mark.parametrize("text", ["3e-3", "1e3", "0.5", "017", "yes", "y", "null", "~", "", "a: b"])
def test_text_that_go_would_read_as_more_is_written_with_quotes(text: str) -> None:
    assert value(dump_documents([{"a": text}])) == {"a": text}

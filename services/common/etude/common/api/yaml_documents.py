"""YAML documents as kubectl reads and writes them, with the position of every value."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import yaml
from pydantic import JsonValue
from typing_extensions import override

_INT = re.compile(r"^[-+]?(0[bB][01_]+|0[oO]?[0-7_]+|0|0[xX][0-9a-fA-F_]+|[1-9][0-9_]*)$")
_FLOAT = re.compile(r"^[-+]?(\.[0-9_]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?$")
_PLAIN_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")

TAGS = (
    ("bool", re.compile(r"^(?:y|Y|yes|Yes|YES|true|True|TRUE|on|On|ON)$"), "yYtToO"),
    ("bool", re.compile(r"^(?:n|N|no|No|NO|false|False|FALSE|off|Off|OFF)$"), "nNfFoO"),
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("float", re.compile(r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"), "-+."),
    ("merge", re.compile(r"^<<$"), "<"),
)
"""Tag, pattern and first characters of what may be more than text.

Source: https://github.com/yaml/go-yaml/blob/v2.4.4/resolve.go."""


def boolean(text: str) -> bool:
    """A scalar with tag bool."""
    return text[:2].lower() in {"y", "ye", "tr", "on"}


def number(text: str) -> int | float | str:
    """A scalar with tag int or float; text where Go finds no number that it can hold."""
    plain = text if text.startswith(".") else text.replace("_", "")
    whole = _parse_int(plain)
    if whole is not None and -(2**63) <= whole < 2**64:
        return whole
    if not _PLAIN_FLOAT.fullmatch(plain) or not math.isfinite(value := float(plain)):
        return text
    # The API server sees 3.0 and 1e3 as JSON's 3 and 1000, which pass as integers.
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


def _parse_int(plain: str) -> int | None:
    """An integer as Go's ParseInt with base 0 reads it: 0x, 0o, 0b, and a bare 0 for octal."""
    sign = -1 if plain.startswith("-") else 1
    digits = plain.lstrip("+-")
    is_octal = len(digits) > 1 and digits[0] == "0" and digits[1].isdigit()
    try:
        return sign * int(digits, 8 if is_octal else 0)
    except ValueError:  # no integer, or one with more digits than Python reads
        return None


FieldPath = tuple[str | int, ...]

MAX_BYTES = 3 * 1024 * 1024
"""What the API server accepts as one request."""
MAX_NODES = 200_000
"""Values of one document with aliases expanded; a small file can otherwise ask for billions."""


class FilePosition(NamedTuple):
    """A place in a file, counted from 1 as editors do."""

    line: int
    column: int


class SyntaxProblem(NamedTuple):
    """A reason for which kubectl would not read a text as YAML."""

    position: FilePosition
    what: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlDocument:
    """One document of a file: its value, where each part stands, what was wrong with it."""

    value: JsonValue
    keys: dict[FieldPath, FilePosition] = field(default_factory=dict)
    """Where the key of each field stands; items of lists stand under `values` alone."""
    values: dict[FieldPath, FilePosition] = field(default_factory=dict)
    """Where each value starts."""
    problems: tuple[SyntaxProblem, ...] = ()
    """What the API server would not even decode."""

    def value_position(self, path: FieldPath) -> FilePosition:
        """Start of the value at path, or of the nearest value around it."""
        while path not in self.values and path:
            path = path[:-1]
        return self.values.get(path, FilePosition(1, 1))

    def key_position(self, path: FieldPath) -> FilePosition:
        """Position of the key of path, or of its value if it is an item of a list."""
        while path not in self.keys and path not in self.values and path:
            path = path[:-1]
        return self.keys.get(path) or self.value_position(path)


class InvalidYamlError(ValueError):
    """A file that is no YAML at all."""

    def __init__(self, problem: SyntaxProblem) -> None:
        super().__init__(problem.what)
        self.problem = problem


def read_bounded(path: Path) -> bytes:
    """The bytes of a file, and no more of them than show that it is too long."""
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def parse_documents(data: bytes) -> list[YamlDocument]:
    """Every document of a file that is not empty.

    Numbers and booleans are told from text as Go's YAML does, because kubectl and the API server
    decide by it: `3e-3` is a number there, and text for PyYAML's own loader.

    Raises:
        InvalidYamlError: the bytes are no YAML.
    """
    try:
        nodes = list(_compose(_decoded(data)))
    except UnicodeDecodeError as cause:
        problem = _whole_file(f"byte {cause.start} is no UTF-8", "save the file as UTF-8")
        raise InvalidYamlError(problem) from cause
    except RecursionError as cause:
        problem = _whole_file("the file is nested too deeply", "write it with fewer levels")
        raise InvalidYamlError(problem) from cause
    except yaml.YAMLError as cause:
        raise InvalidYamlError(_syntax(cause)) from cause
    return [_Reader().document(node) for node in nodes if not _is_empty(node)]


def _decoded(data: bytes) -> str:
    if len(data) > MAX_BYTES:
        what = f"the file has more than {MAX_BYTES} bytes, which is the limit"
        raise InvalidYamlError(_whole_file(what, "split it"))
    return data.decode("utf-8")


def _compose(text: str) -> Iterator[yaml.Node]:
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is not None:
                yield node
    finally:
        loader.dispose()


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _whole_file(what: str, fix: str) -> SyntaxProblem:
    return SyntaxProblem(FilePosition(1, 1), what, fix)


def _syntax(error: yaml.YAMLError) -> SyntaxProblem:
    if not isinstance(error, yaml.MarkedYAMLError):
        return _whole_file(str(error).splitlines()[0], "remove that character")
    mark = error.problem_mark
    position = FilePosition(mark.line + 1, mark.column + 1) if mark else FilePosition(1, 1)
    parts = ", ".join(part for part in (error.context, error.problem) if part)
    return SyntaxProblem(position, f"this is no YAML: {parts}", "correct the YAML")


def dump_documents(values: Iterable[object]) -> str:
    """Documents that kubectl and `parse_documents` take for these values, without anchors.

    PyYAML's own dumper leaves the text 3e-3 without quotes, which Go then reads as a number.
    """
    return yaml.dump_all(values, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with the scalar rules of Go's YAML 2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 PyYAML's own class attribute, replaced so that its rules do not apply


for _name, _pattern, _first in TAGS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, list(_first))


class _Dumper(yaml.SafeDumper):
    """PyYAML's writer with the same rules, so that text which looks like more gets quotes."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    @override
    def ignore_aliases(self, data: object) -> bool:
        return True


class _Reader:
    """Turns one node tree into values, noting positions and problems on the way."""

    def __init__(self) -> None:
        self._keys: dict[FieldPath, FilePosition] = {}
        self._values: dict[FieldPath, FilePosition] = {}
        self._problems: list[SyntaxProblem] = []
        self._nodes = 0

    def document(self, node: yaml.Node) -> YamlDocument:
        try:
            value = self._value(node, ())
        except RecursionError:
            value = None
            self._problem(node, "the document contains itself", "remove the alias to its parent")
        return YamlDocument(
            value=value, keys=self._keys, values=self._values, problems=tuple(self._problems)
        )

    def _value(self, node: yaml.Node, path: FieldPath) -> JsonValue:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            if self._nodes == MAX_NODES + 1:
                self._problem(node, f"more than {MAX_NODES} values", "use fewer aliases")
            return None
        self._values[path] = _position(node)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*path, i)) for i, item in enumerate(node.value)]
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: FieldPath) -> dict[str, JsonValue]:
        result: dict[str, JsonValue] = {}
        merged: dict[str, JsonValue] = {}
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                merged |= self._merged(value_node, path)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(key_node, "a key must be text", "write it as one word")
                continue
            key = _key(key_node)
            here = (*path, key)
            if key in result:
                self._problem(key_node, f"{key} is given twice here", "remove one of the two")
            self._keys[here] = _position(key_node)
            result[key] = self._value(value_node, here)
        return merged | result

    def _merged(self, node: yaml.Node, path: FieldPath) -> dict[str, JsonValue]:
        """Values that `<<` merges in; the mapping's own keys win, then the earlier of a list."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        result: dict[str, JsonValue] = {}
        for source in reversed(sources):
            if not isinstance(source, yaml.MappingNode):
                self._problem(source, "<< needs a mapping", "give it an alias to one")
                continue
            result |= self._mapping(source, path)
        return result

    def _scalar(self, node: yaml.Node) -> JsonValue:
        text = str(node.value)
        match node.tag.rpartition(":")[2]:
            case "null":
                return None
            case "bool":
                return boolean(text)
            case "int" | "float" if "n" not in text.lower():
                return number(text)
            case "float":
                self._problem(node, f"{text} is no number that JSON has", "give a finite number")
                return 0.0
            case "str":
                return text
            case _:
                self._problem(node, f"tag {node.tag} is not understood", "remove the tag")
                return text

    def _problem(self, node: yaml.Node, what: str, fix: str) -> None:
        self._problems.append(SyntaxProblem(_position(node), what, fix))


def _position(node: yaml.Node) -> FilePosition:
    return FilePosition(node.start_mark.line + 1, node.start_mark.column + 1)


def _key(node: yaml.ScalarNode) -> str:
    """A key as JSON text: the API server turns true and 1 into the words they stand for."""
    match node.tag.rpartition(":")[2]:
        case "bool":
            return "true" if boolean(node.value) else "false"
        case "int":
            return str(number(node.value))
        case "null":
            return "null"
        case _:
            return str(node.value)

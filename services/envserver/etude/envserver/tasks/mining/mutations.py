"""Mutations of functions: small changes of one function's source, along its syntax. Pure."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tree_sitter import Node

from etude.envserver.tasks.mining.languages import MinedLanguage, load_parser

MIN_LINES, MAX_LINES = 3, 150
"""Of a function's body: shorter ones are guessed, longer ones hide what is broken."""
_MAX_SOURCE_BYTES = 1 << 20
_MAX_DEPTH = 200
_BOOLEANS = frozenset({"true", "false", "boolean_literal"})
_TESTS = "tests"
"""Name of the module of a Rust file that holds its unit tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MinedFunction:
    """One function of a source file."""

    path: str
    name: str
    """With the classes or types around it, separated by dots."""
    line: int
    """First line, from 1."""
    documentation: str
    """As its author wrote it, without markers of comments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One change of a function's source."""

    function: MinedFunction
    kind: str
    """Operator, Integer, Boolean, Condition, Statement, or Body for all of it."""
    start: int
    end: int
    """Bytes of the source that are replaced, from the first to before the last."""
    replacement: str

    @property
    def key(self) -> str:
        """Identity within a repository's files."""
        return f"{self.function.path}:{self.start}-{self.end}:{self.kind}"

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.replacement.encode() + source[self.end :]


def list_mutations(path: str, source: bytes, language: MinedLanguage) -> list[list[Mutation]]:
    """The mutations of each function of a file that keep its syntax, by function.

    A file that does not parse, or is larger than a mebibyte, has none.
    """
    if len(source) > _MAX_SOURCE_BYTES:
        return []
    root = load_parser(language.name).parse(source).root_node
    if root.has_error:
        return []
    found = []
    for node, outer in _functions(root, language, (), 0):
        function = _describe(node, outer, path, language)
        if mutations := list(_mutate(node, function, language)):
            found.append(mutations)
    return found


def choose_mutations(
    functions: list[list[Mutation]], *, seed: int, per_function: int, num_more: int = 0
) -> list[list[Mutation]]:
    """Mutations of each function in the order in which they are tried: documented ones first.

    A function's choice depends on the seed and on itself alone, so that a change of one function
    leaves the mutations of the others.

    Args:
        functions: all mutations of each.
        seed: of the choice.
        per_function: mutations of different kinds.
        num_more: mutations of any kind behind them.
    """
    chosen = list[tuple[tuple[bool, float], list[Mutation]]]()
    for mutations in functions:
        function = mutations[0].function
        rng = random.Random(f"{seed} {function.path} {function.name}")  # noqa: S311 - no secret
        is_last = not function.documentation or function.name.rpartition(".")[2].startswith("_")
        kinds = sorted({each.kind for each in mutations})
        rng.shuffle(kinds)
        picked = [
            rng.choice([each for each in mutations if each.kind == kind])
            for kind in kinds[:per_function]
        ]
        place = (is_last, rng.random())
        others = [each for each in mutations if each not in picked]
        more = rng.sample(others, min(num_more, len(others)))
        chosen.append((place, [*picked, *more]))
    return [picked for _, picked in sorted(chosen, key=lambda row: row[0])]


def _functions(
    node: Node, language: MinedLanguage, outer: tuple[str, ...], depth: int
) -> Iterator[tuple[Node, tuple[str, ...]]]:
    """Functions below a node with the names around them; none within a function."""
    if depth > _MAX_DEPTH:
        return
    for child in node.children:
        if child.type in language.functions:
            if child.child_by_field_name("name") and child.child_by_field_name("body"):
                yield child, outer
            continue
        owner = child.child_by_field_name("name") or child.child_by_field_name("type")
        is_owner = owner is not None and child.child_by_field_name("body") is not None
        if is_owner and _text(owner) == _TESTS:
            continue
        inner = (*outer, _text(owner)) if is_owner else outer
        yield from _functions(child, language, inner, depth + 1)


def _describe(
    node: Node, outer: tuple[str, ...], path: str, language: MinedLanguage
) -> MinedFunction:
    receiver = re.search(r"(\w+)\s*\)", _text(node.child_by_field_name("receiver")))
    if receiver is not None:
        outer = (receiver[1],)
    own = _text(node.child_by_field_name("name"))
    return MinedFunction(
        path=path,
        name=".".join((*outer, own)),
        line=node.start_point[0] + 1,
        documentation=_documentation(node, language),
    )


def _documentation(node: Node, language: MinedLanguage) -> str:
    if not language.comments:
        return _text(_docstring(node)).lstrip("rRbBuU").strip("\"'").strip()
    lines = list[str]()
    is_exported = node.parent is not None and node.parent.type == "export_statement"
    before = node.parent.prev_sibling if node.parent and is_exported else node.prev_sibling
    while before is not None and before.type in {*language.comments, "attribute_item"}:
        if before.type in language.comments:
            lines.insert(0, _text(before))
        before = before.prev_sibling
    plain = [part.strip().strip("/*!").strip() for text in lines for part in text.splitlines()]
    return "\n".join(plain).strip()


def _docstring(function: Node) -> Node | None:
    body = function.child_by_field_name("body")
    first = body.children[0] if body is not None and body.children else None
    if first is None or first.type != "expression_statement" or not first.children:
        return None
    return first.children[0] if first.children[0].type == "string" else None


def _mutate(node: Node, function: MinedFunction, language: MinedLanguage) -> Iterator[Mutation]:
    parts = _list_statements(node, language)
    if not parts:
        return
    num_lines = parts[-1].end_point[0] - parts[0].start_point[0] + 1
    if not MIN_LINES <= num_lines <= MAX_LINES:
        return

    def replace(kind: str, first: Node, last: Node, text: str) -> Mutation:
        return Mutation(
            function=function,
            kind=kind,
            start=first.start_byte,
            end=last.end_byte,
            replacement=text,
        )

    yield replace("Body", parts[0], parts[-1], language.body)
    pending = parts[::-1]
    while pending:
        part = pending.pop()
        if part.type not in language.functions:
            pending += part.children[::-1]
            for kind, changed, text in _list_changes(part, language):
                yield replace(kind, changed, changed, text)


def _list_statements(function: Node, language: MinedLanguage) -> list[Node]:
    """Statements of a function's body, without comments and its documentation."""
    body = function.child_by_field_name("body")
    statements = [] if body is None else body.named_children
    parts = [each for each in statements if "comment" not in each.type]
    is_documented = not language.comments and _docstring(function) is not None
    return parts[1:] if is_documented else parts


def _list_changes(node: Node, language: MinedLanguage) -> Iterator[tuple[str, Node, str]]:
    if node.type in language.expressions:
        for child in node.children:
            if child.type in language.operators:
                yield "Operator", child, language.operators[child.type]
    condition = node.child_by_field_name("condition")
    # Rust's `if let` binds names: it has no negation.
    if condition is not None and "let" not in condition.type:
        before, behind = language.negation
        inner = condition.named_children[0] if "parenthes" in condition.type else condition
        yield "Condition", inner, f"{before}{_text(inner)}{behind}"
    if node.type == language.integer and _text(node).isdecimal():
        yield "Integer", node, str(int(_text(node)) + 1)
    if node.type in _BOOLEANS and _text(node) in language.booleans:
        yield "Boolean", node, language.booleans[_text(node)]
    if node.type in language.statements and _text(node) != language.statements[node.type]:
        yield "Statement", node, language.statements[node.type]


def _text(node: Node | None) -> str:
    return (node.text or b"").decode(errors="replace") if node is not None else ""

"""Questions with their answers: what a docstring says, and the code below it."""

import ast
import re
import warnings
from collections.abc import Iterator
from typing import NamedTuple

from search_bench.corpus import File

MIN_WORDS, MAX_WORDS = 4, 60
MIN_BODY_LINES = 3
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Answer(NamedTuple):
    """A function or class that is documented."""

    package: str
    path: str
    name: str
    line: int
    """Of its name."""
    question: str
    """First paragraph of its docstring."""
    code: str
    """Its lines, without the docstring."""


def answers(file: File) -> Iterator[Answer]:
    """The documented functions of one file, and its small classes."""
    tree = parsed(file.text)
    lines = file.text.split("\n")
    for node in _definitions(tree) if tree else ():
        question = _question(ast.get_docstring(node) or "")
        code = _code(node, lines)
        if question and len(code) >= MIN_BODY_LINES:
            yield Answer(file.package, file.path, node.name, node.lineno, question, "\n".join(code))


def without_docstrings(text: str) -> str:
    """The same code with empty lines in place of all docstrings."""
    lines = text.split("\n")
    tree = parsed(text)
    for node in (tree, *_definitions(tree)) if tree else ():
        for number in _docstring(node):
            lines[number - 1] = ""
    return "\n".join(lines)


def parsed(text: str) -> ast.Module | None:
    """The syntax tree of a file; of templates and of code for other versions there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _definitions(node: ast.AST) -> Iterator[_Definition]:
    """Functions and classes below a node; expressions hold none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            yield child
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _definitions(child)


def _question(docstring: str) -> str:
    first = re.split(r"\n\s*\n|\n\s*[:@>]|\n\s*-{3,}", docstring.strip())[0]
    words = first.split()
    letters = sum(letter.isascii() and letter.isalpha() for letter in first)
    if not MIN_WORDS <= len(words) <= MAX_WORDS or letters < len(first) // 2:
        return ""
    return " ".join(words)


def _docstring(node: _Definition | ast.Module) -> range:
    """Numbers of the lines of a docstring that stands alone on them."""
    first = node.body[0] if node.body else None
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
        and first.end_lineno is not None
        and (isinstance(node, ast.Module) or first.lineno > node.lineno)
    ):
        return range(first.lineno, first.end_lineno + 1)
    return range(0)


def _code(node: _Definition, lines: list[str]) -> list[str]:
    left_out = set(_docstring(node))
    numbers = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return [lines[n - 1] for n in numbers if n not in left_out and lines[n - 1].strip()]

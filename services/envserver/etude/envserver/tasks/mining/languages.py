"""Languages whose repositories can be mined: one entry each, for one tree-sitter grammar each."""

import functools
import importlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from tree_sitter import Language as Grammar
from tree_sitter import Parser

_TEST_FOLDERS = frozenset({"test", "tests", "__tests__", "testdata"})
_OTHER_FOLDERS = frozenset(
    {"bench", "benches", "benchmarks", "doc", "docs", "example", "examples", "scripts", "vendor"}
    | {"node_modules"}
)
_OPERATORS: Mapping[str, str] = {
    "==": "!=",
    "!=": "==",
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "+": "-",
    "-": "+",
    "*": "+",
    "+=": "-=",
    "-=": "+=",
    "&&": "||",
    "||": "&&",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MinedLanguage:
    """Syntax of a language as mutations see it, and the usual way to run its tests."""

    name: str
    manifests: Sequence[str]
    """Files in a repository's root by which it is recognised."""
    module: str
    """Python module of the grammar."""
    ending: str
    """Of source files."""
    test_file: str
    """Regular expression of the names of test files outside of test folders."""
    test_command: str
    log_form: str
    """Form of the log that the test command prints."""
    functions: Collection[str]
    """Node types of functions with the fields `name` and `body`."""
    operators: Mapping[str, str] = field(default_factory=lambda: _OPERATORS)
    """Replacement of each operator, by its node type."""
    expressions: Collection[str]
    """Node types whose operators are replaced."""
    integer: str
    """Node type of an integer literal."""
    booleans: Mapping[str, str] = field(default_factory=lambda: {"true": "false", "false": "true"})
    """Replacement of each boolean, by its text."""
    negation: tuple[str, str] = ("!(", ")")
    """Texts before and behind a condition that is negated."""
    statements: Mapping[str, str]
    """Replacement of a statement that is removed, by its node type."""
    body: str
    """Replacement of the statements of a function that is to be written again."""
    comments: Collection[str]
    """Node types of comments before a function that document it; empty: a text in its body does."""

    def is_test(self, path: str) -> bool:
        """Tell whether a path names a file of the tests."""
        *folders, name = PurePosixPath(path).parts
        return bool(_TEST_FOLDERS & {*folders}) or re.fullmatch(self.test_file, name) is not None

    def is_source(self, path: str) -> bool:
        """Tell whether functions of this file may be broken."""
        folders = {*PurePosixPath(path).parts[:-1]}
        is_hidden = any(folder.startswith(".") for folder in folders)
        return (
            path.endswith(self.ending)
            and not is_hidden
            and not folders & _OTHER_FOLDERS
            and not self.is_test(path)
            and PurePosixPath(path).name not in {"setup.py", "noxfile.py", "build.rs"}
        )


PYTHON = MinedLanguage(
    name="python",
    manifests=("pyproject.toml", "setup.py", "setup.cfg"),
    module="tree_sitter_python",
    ending=".py",
    test_file=r"test_.*\.py|.*_test\.py|conftest\.py",
    test_command="python3 -m pytest -rA --tb=short -p no:cacheprovider",
    log_form="pytest",
    functions=("function_definition",),
    operators={
        **{key: value for key, value in _OPERATORS.items() if key not in {"&&", "||"}},
        "and": "or",
        "or": "and",
        "is": "is not",
        "is not": "is",
        "in": "not in",
        "not in": "in",
    },
    expressions=(
        *("comparison_operator", "binary_operator", "boolean_operator", "augmented_assignment"),
    ),
    integer="integer",
    booleans={"True": "False", "False": "True"},
    negation=("not (", ")"),
    statements={"expression_statement": "pass", "return_statement": "return None"},
    body="raise NotImplementedError",
    comments=(),
)
JAVASCRIPT = MinedLanguage(
    name="javascript",
    manifests=("package.json",),
    module="tree_sitter_javascript",
    ending=".js",
    test_file=r".*[._-](?:test|spec)\.js|test\.js",
    test_command="node --test --test-reporter=tap",
    log_form="tap",
    functions=("function_declaration", "generator_function_declaration", "method_definition"),
    operators={**_OPERATORS, "===": "!==", "!==": "==="},
    expressions=("binary_expression", "augmented_assignment_expression"),
    integer="number",
    statements={"expression_statement": ";", "return_statement": "return undefined;"},
    body="throw new Error('not implemented');",
    comments=("comment",),
)
GO = MinedLanguage(
    name="go",
    manifests=("go.mod",),
    module="tree_sitter_go",
    ending=".go",
    test_file=r".*_test\.go",
    test_command=(
        "PATH=$PATH:/usr/local/go/bin CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS=-mod=mod"
        " go test -json -vet=off ./..."
    ),
    log_form="go",
    functions=("function_declaration", "method_declaration"),
    expressions=("binary_expression", "assignment_statement"),
    integer="int_literal",
    statements={"expression_statement": ""},
    body='panic("not implemented")',
    comments=("comment",),
)
RUST = MinedLanguage(
    name="rust",
    manifests=("Cargo.toml",),
    module="tree_sitter_rust",
    ending=".rs",
    test_file=r"tests?\.rs",
    # Unit tests stand in files of the source, which cannot be hidden.
    test_command="cargo test --offline --no-fail-fast --test '*'",
    log_form="cargo",
    functions=("function_item",),
    expressions=("binary_expression", "compound_assignment_expr"),
    integer="integer_literal",
    statements={"expression_statement": ""},
    body="todo!()",
    comments=("line_comment", "block_comment"),
)
LANGUAGES = (RUST, GO, PYTHON, JAVASCRIPT)
"""In the order in which a repository with several manifests is taken for one of them."""


def detect_language(files: Collection[str]) -> MinedLanguage | None:
    """The language whose manifest lies in the root of a repository."""
    roots = {path for path in files if "/" not in path}
    fitting = [each for each in LANGUAGES if roots & {*each.manifests}]
    return fitting[0] if fitting else None


@functools.cache
def load_parser(language_name: str) -> Parser:
    """Load the parser of a language."""
    language = next(each for each in LANGUAGES if each.name == language_name)
    return Parser(Grammar(importlib.import_module(language.module).language()))

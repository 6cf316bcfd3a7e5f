"""Grammars of the files that are parsed, by their endings."""

from typing import NamedTuple

READY = b"ready\n"
"""First line of the worker: the grammars are loaded, and the jail is closed."""


class Grammar(NamedTuple):
    """Module and function of a tree-sitter grammar."""

    module: str
    function: str = "language"


GRAMMARS = {
    "c": Grammar("tree_sitter_c"),
    "cpp": Grammar("tree_sitter_cpp"),
    "go": Grammar("tree_sitter_go"),
    "java": Grammar("tree_sitter_java"),
    "javascript": Grammar("tree_sitter_javascript"),
    "python": Grammar("tree_sitter_python"),
    "rust": Grammar("tree_sitter_rust"),
    "tsx": Grammar("tree_sitter_typescript", "language_tsx"),
    "typescript": Grammar("tree_sitter_typescript", "language_typescript"),
}
_ENDINGS = {
    "c": "c",
    "cpp": "cc cpp cxx h hh hpp hxx cu cuh",
    "go": "go",
    "java": "java",
    "javascript": "js jsx mjs cjs",
    "python": "py pyi",
    "rust": "rs",
    "tsx": "tsx",
    "typescript": "ts mts cts",
}
_BY_ENDING = {ending: name for name, endings in _ENDINGS.items() for ending in endings.split()}


def grammar_of(path: str) -> str | None:
    """Name of the grammar for a file with this path, if there is one."""
    return _BY_ENDING.get(path.rpartition(".")[2].lower()) if "." in path else None

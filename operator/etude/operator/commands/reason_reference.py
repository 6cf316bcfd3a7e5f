"""Reason reference: writes docs/reference/reasons.md from the reason codes."""

import ast
import inspect
import itertools
from pathlib import Path

from etude.operator import reasons

PAGE = Path("docs") / "reference" / "reasons.md"

HEAD = """# Reasons

Every condition, and every Event that the operator makes of what it finds, carries one of these
codes. What a run's processes say of themselves passes through unchanged, with their own codes and
sentences: Events such as `PhaseStarted`, `Evaluated` and `Stalled`, condition Degraded, and the
failure of a run that its controller ended.

| reason | meaning |
|---|---|
"""


def meanings() -> dict[str, str]:
    """Each code with the sentence under it, in the order of the source."""
    enum = next(
        node
        for node in ast.parse(inspect.getsource(reasons)).body
        if isinstance(node, ast.ClassDef) and node.name == reasons.Reason.__name__
    )
    found = {}
    for code, sentence in itertools.pairwise(enum.body):
        if isinstance(code, ast.Assign) and isinstance(sentence, ast.Expr):
            found[ast.literal_eval(code.value)] = str(ast.literal_eval(sentence.value))
    return found


def page() -> str:
    """The page as Markdown."""
    rows = [f"| `{code}` | {' '.join(text.split())} |" for code, text in meanings().items()]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())

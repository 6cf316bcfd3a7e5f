"""Playing the golden run, and writing down what came back."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.harness.golden.calls import Need, Step
from tests.harness.golden.script import TURNS

from etude.agent.search.codebase import Codebase
from etude.agent.search.shared_index import SharedIndex
from etude.agent.tool_calls import call_from_json
from etude.agent.tools.base import ToolOutcome
from etude.agent.toolsets import run_calls, toolset
from etude.agent.workspace import Workspace
from etude.envserver.storage.trees import Tree

FILE = Path(__file__).with_name("transcript.txt")
_SHOWN_CHARS = 1200
_SHOWN_ARGUMENTS = 300
_HEAD_LINES, _TAIL_LINES = 12, 6


class Stage(NamedTuple):
    """Where the run is played."""

    workspace: Workspace
    """Holds the run's files, and nothing else."""
    has: frozenset[Need]


class Row(NamedTuple):
    """One call, and what came of it."""

    number: int
    turn: int
    step: Step
    outcome: ToolOutcome | None
    """None where the call was left out."""
    missing: frozenset[Need]
    """Why."""

    @property
    def text(self) -> str:
        """The row as the transcript has it."""
        head = f"#{self.number:03} turn {self.turn} {self.step.name}"
        arguments = _ascii(_cut(self.step.arguments_json, _SHOWN_ARGUMENTS))
        if self.outcome is None:
            missing = "; ".join(sorted(self.missing))
            return f"{head} {arguments}\nleft out: needs {missing}\n"
        content = self.outcome.content.encode()
        facts = (
            f"{self.outcome.kind.name.lower()}, {len(content)} bytes,"
            f" {self.outcome.omitted_bytes} omitted, sha256 {hashlib.sha256(content).hexdigest()}"
        )
        lines = _ascii(_cut(self.outcome.content, _SHOWN_CHARS)).split("\n")
        if len(lines) > _HEAD_LINES + _TAIL_LINES:
            left = len(lines) - _HEAD_LINES - _TAIL_LINES
            lines[_HEAD_LINES:-_TAIL_LINES] = [f"[... {left} lines ...]"]
        return "\n".join([f"{head} {arguments}", facts, *(f"  | {line}" for line in lines), ""])


async def play(stage: Stage, tree: Tree) -> list[Row]:
    """Make all calls that the stage has what it takes for."""
    tools = toolset("Standard")
    stage.workspace.codebase = Codebase(
        SharedIndex({path: file.content for path, file in tree.items()})
    )
    rows: list[Row] = []
    for turn, steps in enumerate(TURNS, 1):
        able = [step for step in steps if step.needs <= stage.has]
        calls = [call_from_json(step.name, step.arguments_json) for step in able]
        outcomes = iter(await run_calls(tools, stage.workspace, calls))
        for step in steps:
            missing = step.needs - stage.has
            outcome = None if missing else next(outcomes)
            rows.append(Row(len(rows) + 1, turn, step, outcome, missing))
    return rows


def written(rows: Iterable[Row]) -> str:
    """The transcript, one paragraph a call."""
    return "\n".join(row.text for row in rows)


def paragraphs(text: str) -> list[str]:
    """The calls of a transcript."""
    return [f"#{part}" for part in f"\n{text}".split("\n#")[1:]]


def differences(rows: Sequence[Row], golden: Sequence[str]) -> Iterator[str]:
    """Both versions of each call that was made and came out otherwise."""
    if len(rows) != len(golden):
        yield f"{len(rows)} calls, and {len(golden)} in {FILE.name}: write it again"
    for row, expected in zip(rows, golden, strict=False):
        if row.outcome is not None and row.text.strip() != expected.strip():
            yield f"{row.text}--- and in {FILE.name}:\n{expected}"


def left_out(rows: Iterable[Row]) -> list[str]:
    """The calls that were not made, and why."""
    return [
        f"left out: #{row.number:03} {row.step.name} needs {'; '.join(sorted(row.missing))}"
        for row in rows
        if row.outcome is None
    ]


def _cut(text: str, size: int) -> str:
    left = len(text) - size
    return text if left <= 0 else f"{text[: size // 2]}[... {left} ...]{text[-size // 2 :]}"


def _ascii(text: str) -> str:
    """What any editor and any diff shows: other characters are escaped."""
    return "".join(
        char if char == "\n" or " " <= char <= "~" else char.encode("unicode_escape").decode()
        for char in text
    )

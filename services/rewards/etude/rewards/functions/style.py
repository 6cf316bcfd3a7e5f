"""Penalty for the style of a change: its size, its new lints, its unformatted lines."""

import math
import operator
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from google.protobuf.message import DecodeError

from etude.agent.tools import lints
from etude.agent.tools.base import ToolError
from etude.agent.workspace import WorkspaceError
from etude.common.api.run.rewards import StyleParameters
from etude.common.errors import UnavailableError
from etude.rewards.faults import Fault, FaultReason
from etude.rewards.functions.base import FinishedRollout, MeasuredPenalty
from etude.v1 import environments_pb2, rollout_pb2

MAX_CHECKED_FILES = 50
"""Python files that ruff reads of one change: one thread of it serves all rollouts."""


class StyleFigures(NamedTuple):
    """Measured style of one change; infinite if a tool read not all files."""

    changed_lines: float
    new_lints: float
    unformatted_lines: float


class _FileChange(NamedTuple):
    path: str
    before: bytes
    after: bytes


def penalty(figures: StyleFigures, parameters: StyleParameters) -> float:
    """Weighted mean of the three parts, from 0 to 1. Pure."""
    weights = parameters.weights
    rows = (
        (weights.size, (figures.changed_lines - parameters.free_lines) / parameters.max_lines),
        (weights.lints, figures.new_lints / parameters.max_lints),
        (weights.formatting, figures.unformatted_lines / parameters.max_unformatted_lines),
    )
    total = math.fsum(weight for weight, _ in rows)
    parts = math.fsum(weight * min(1.0, max(0.0, part)) for weight, part in rows)
    return parts / total if total else 0.0


async def measure_style(
    diff: environments_pb2.WorkspaceDiff, originals: Mapping[str, bytes], *, has_image: bool
) -> StyleFigures:
    """Measure a change against the first files of its task.

    Args:
        diff: the change.
        originals: the files of the task's folder environment/, by path.
        has_image: True if the workspace may have had other files at first.

    Raises:
        UnavailableError: there is no ruff on this machine, or no jail for it.
    """
    changes = _file_changes(diff, originals, has_image=has_image)
    num_checked = sum(change.path.endswith(lints.SUFFIXES) for change in changes)
    worst = 0.0 if num_checked <= MAX_CHECKED_FILES else math.inf
    total = StyleFigures(0, worst, worst)
    for change in changes:
        if math.isinf(total.new_lints):  # ruff cannot make it better: count the lines alone
            figures = StyleFigures(count_changed_lines(change.before, change.after), 0, 0)
        else:
            figures = await _measure_file(change)
        total = StyleFigures(*map(operator.add, total, figures))
    return total


def _file_changes(
    diff: environments_pb2.WorkspaceDiff, originals: Mapping[str, bytes], *, has_image: bool
) -> list[_FileChange]:
    changes = [
        _FileChange(file.path, originals.get(file.path, b""), file.content)
        for file in diff.written
        if file.path in originals or not has_image
    ]
    removed = [path for path in diff.deleted if path in originals]
    return changes + [_FileChange(path, originals[path], b"") for path in removed]


async def _measure_file(change: _FileChange) -> StyleFigures:
    path, before, after = change
    lines = count_changed_lines(before, after)
    try:
        new_lints = len(await lints.new_lints(path, before, after))
        unformatted = await _count_unformatted(path, after)
        if unformatted:
            unformatted = max(0, unformatted - await _count_unformatted(path, before))
    except (ToolError, WorkspaceError):  # too large, too slow to check, or an impossible name
        return StyleFigures(lines, math.inf, math.inf)
    return StyleFigures(lines, new_lints, unformatted)


async def _count_unformatted(path: str, data: bytes) -> int:
    """Number of lines that the formatter would remove or add."""
    formatted = await lints.format_file(path, data)
    return 0 if formatted is None else count_changed_lines(data, formatted)


def count_changed_lines(before: bytes, after: bytes) -> int:
    """Number of lines that only one of two files has, in any order; linear in their size."""
    old, new = (Counter(data.splitlines()) for data in (before, after))
    return (old - new).total() + (new - old).total()


async def measure(rollout: FinishedRollout, parameters: StyleParameters) -> float | Fault:
    """Penalty of a rollout's change, or the fault that masks it."""
    if rollout.record.ending == rollout_pb2.ENDING_CHANGE_TOO_LARGE:
        return 1.0  # nothing of it can be read
    try:
        diff = environments_pb2.WorkspaceDiff.FromString(rollout.record.diff)
        figures = await measure_style(diff, rollout.originals, has_image=rollout.has_image)
    except UnavailableError as error:
        return Fault(FaultReason.GRADER_ERROR, str(error))
    except DecodeError as error:
        return Fault(FaultReason.ROLLOUT_FAULT, f"its diff cannot be read: {error}")
    return penalty(figures, parameters)


FUNCTION = MeasuredPenalty(
    version="2", parameters=StyleParameters, measure=measure, reads_originals=True
)

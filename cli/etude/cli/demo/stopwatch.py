"""Working time of a demo, summed over its sessions."""

import json
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

FILE = "demo-times.jsonl"


class DemoSession(NamedTuple):
    """From one start of the command to its end, in Unix time."""

    started_s: float
    ended_s: float


class Stopwatch(NamedTuple):
    """Counts the time of all sessions, and none between them."""

    sessions: tuple[DemoSession, ...]

    def seconds_before(self, time_s: float) -> float:
        """Seconds of work before a Unix time."""
        return sum(
            max(0.0, min(time_s, session.ended_s) - session.started_s) for session in self.sessions
        )

    @property
    def total_s(self) -> float:
        """Seconds of work in all."""
        return sum(session.ended_s - session.started_s for session in self.sessions)


def record_session(folder: Path, what: Literal["started", "ended"], time_s: float) -> None:
    """Record that the command started or ended."""
    with (folder / FILE).open("a") as file:
        file.write(json.dumps({"what": what, "time_s": time_s}) + "\n")


def read_stopwatch(folder: Path, signs: Iterable[float]) -> Stopwatch:
    """The sessions of a run folder.

    Args:
        folder: a demo's run folder.
        signs: Unix times at which the run was seen at work; a session that was killed wrote down
            no end of its own, so the last of them before the next start stands in.
    """
    path = folder / FILE
    notes = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    ends = sorted([*signs, *(n["time_s"] for n in notes if n["what"] == "ended")])
    starts = [n["time_s"] for n in notes if n["what"] == "started"] or ends[:1]
    sessions = []
    for start, following in zip(starts, [*starts[1:], float("inf")], strict=True):
        before = bisect_left(ends, following)
        sessions.append(DemoSession(start, max(start, ends[before - 1]) if before else start))
    return Stopwatch(tuple(sessions))

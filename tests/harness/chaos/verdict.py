"""Judges a run by its ledger and its journals alone."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tests.harness.chaos import journal
from tests.harness.chaos.journal import Line
from tests.harness.chaos.settings import Settings

from etude.common.weights import VersionId

UNEXPLAINED = ("would lead to state", "builds on state", "memory was damaged", "live words")
"""What a replica says when a check before it has failed to stop something."""

_IDENTITY = re.compile(r"([0-9]{6})[-/]([0-9]{12})")
JUST_OPENED_S = 1.0
"""A publisher writes its epoch down a moment after it opened it."""


class Epoch(NamedTuple):
    """An epoch as its publisher wrote it down."""

    parent: VersionId | None
    opened_at: float
    """After the store had it."""


class Judgement(NamedTuple):
    """What the servers did."""

    passes: int
    """Different states and labels that were served."""
    wrong_bits: list[str]
    wrong_versions: list[str]
    unexplained: list[str]
    """Refusals, or vanished objects, that no fault explains."""
    not_undone: list[str]
    """Commits that a rank failed, and nobody undid."""
    faults: Counter[str]
    seen: Counter[str]
    peak_rss_mib: float


def judge(settings: Settings, wrong_deltas: Iterable[VersionId]) -> Judgement:
    """Read everything that was written down."""
    lines = list(journal.read(settings.folder / "journal"))
    ledger = {line["version"]: line["sha"] for line in journal.read(settings.ledger)}
    passes = [line for line in lines if line["kind"] == "pass"]
    epochs = {
        line["epoch"]: Epoch(VersionId(*line["parent"]) if line["parent"] else None, line["t"])
        for line in lines
        if line["kind"] == "opened"
    }
    return Judgement(
        passes=len(passes),
        wrong_bits=[_told(line) for line in passes if _is_wrong(line, ledger)],
        wrong_versions=[_told(line) for line in passes if line["label"] not in ledger]
        + [_told(line) for line in lines if line["kind"] == "live" and _is_dead(line, epochs)],
        unexplained=list(_unexplained(lines, {str(each) for each in wrong_deltas}, epochs)),
        not_undone=list(_not_undone(lines)),
        faults=Counter(line["fault"] for line in lines if line["kind"] == "fault"),
        seen=Counter(line["fault"] for line in lines if line["kind"] == "seen"),
        peak_rss_mib=max((line["rss_kib"] for line in lines if line["kind"] == "end"), default=0)
        / 1024,
    )


def _told(line: Line) -> str:
    return f"{line['who']} at {line['t']:.3f}: {line.get('label') or line['version']}"


def _is_wrong(line: Line, ledger: Mapping[str, str]) -> bool:
    """Whether a pass saw other bits than its label's, or two labels."""
    if line["label"] != line["after"]:
        return True
    return line["label"] in ledger and ledger[line["label"]] != line["sha"]


def _is_dead(line: Line, epochs: Mapping[int, Epoch]) -> bool:
    """Whether a version went live that a newer epoch had left behind before the reader asked."""
    asked = line["asked"] if line["asked"] is not None else line["t"]
    return _is_left_behind(VersionId.parse(line["version"]), epochs, asked)


def _is_left_behind(version: VersionId, epochs: Mapping[int, Epoch], at: float) -> bool:
    """Whether the newest epoch that was open by then does not descend from a version."""
    newer = [e for e, each in epochs.items() if e > version.epoch and each.opened_at < at]
    if not newer:
        return False
    epoch = max(newer)
    while epoch in epochs:
        parent = epochs[epoch].parent
        if parent is None:
            return True
        if parent.epoch <= version.epoch:
            return version > parent
        epoch = parent.epoch
    return False  # its publisher was killed before it could say what it had opened


def _unexplained(
    lines: Iterable[Line], wrong_deltas: set[str], epochs: Mapping[int, Epoch]
) -> Iterable[str]:
    for line in lines:
        if line["kind"] == "vanished" and line["is_leased"] and not _is_of_dead(line, epochs):
            yield f"{line['who']}: {line['key']} vanished under a lease"
        if line["kind"] == "refused" and any(sign in line["text"] for sign in UNEXPLAINED):
            words = line["text"].replace(",", " ").replace(":", " ").split()
            if not wrong_deltas & set(words):
                yield f"{line['who']}: {line['text']}"


def _is_of_dead(line: Line, epochs: Mapping[int, Epoch]) -> bool:
    """Whether what vanished was of a version that no epoch builds on: no lease keeps those."""
    named = [VersionId(int(e), int(n)) for e, n in _IDENTITY.findall(line["key"])]
    return any(_is_left_behind(version, epochs, line["t"] + JUST_OPENED_S) for version in named)


def _not_undone(lines: Iterable[Line]) -> Iterable[str]:
    """Of each process: its failed commits, less those undone, and at most one that killed it."""
    failed: Counter[str] = Counter()
    for line in lines:
        fault = line.get("fault")
        if fault == "rank fails in commit":
            failed[line["who"]] += 1 if line["kind"] == "fault" else -1
        elif line["kind"] == "end" and failed[line["who"]]:
            yield f"{line['who']}: {failed[line['who']]} commits that failed were not undone"
    yield from (f"{who}: {n} commits were not undone" for who, n in failed.items() if n > 1)

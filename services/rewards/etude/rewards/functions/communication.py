"""Penalty for claims of the final message that no tool result shows, and for silence."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from etude.agent import transcript
from etude.common.api.run.rewards import CommunicationParameters
from etude.rewards.functions import unfinished
from etude.rewards.functions.base import Penalty
from etude.v1 import rollout_pb2

_MAX_CHARS = 65_536
_CLAUSE_END = re.compile(r"[.!?;:,\n—]+(?:\s|$)|\n")
_NOT_BEFORE = re.compile(
    r"\b(?:not|never|no|none|without|cannot|unable|if|once|until|whether|should|would|could|may|"
    r"might|must|please)\b|n't\b",
    re.IGNORECASE,
)
_NOT_INSIDE = re.compile(
    r"\b(?:not|never|should|would|could|may|might|must|cannot|fail\w*)\b|n't\b", re.IGNORECASE
)
_GOOD = r"(?:pass(?:es|ed|ing)?|succeed(?:s|ed)?|green|clean(?:ly)?|successful(?:ly)?|ok)"
_NO_FINDINGS = (
    r"(?:no|zero|0|without(?: any)?)\s+(?:new\s+)?(?:errors?|issues?|warnings?|problems?)"
)


class _Claim(NamedTuple):
    """A sentence that needs evidence, and the programs that give it."""

    pattern: re.Pattern[str]
    programs: transcript.Beginnings


class _Evidence(NamedTuple):
    """Calls after the last edit, and the paths that were edited before them."""

    calls: Sequence[rollout_pb2.CallRecord]
    paths: frozenset[str]


def _claim(subject: str, outcome: str, programs: transcript.Beginnings) -> _Claim:
    pattern = (
        rf"\b(?:{subject})\b.{{0,60}}?\b(?:{outcome})\b|\b{_GOOD}\b.{{0,30}}?\b(?:{subject})\b"
    )
    return _Claim(re.compile(pattern, re.IGNORECASE), programs)


_TESTS = _claim(r"tests?|test ?suite", _GOOD, transcript.TESTS)
_LINTS = _claim(
    r"lint\w*|ruff|flake8|pylint|mypy|pyright|eslint|type[- ]?check\w*",
    rf"{_GOOD}|{_NO_FINDINGS}",
    transcript.LINTERS,
)
_BUILD = _claim(
    r"builds?|compil(?:es|ed|ation)", rf"{_GOOD}|{_NO_FINDINGS}|works?", transcript.BUILDS
)


def penalty(
    rollout: rollout_pb2.Rollout, parameters: CommunicationParameters, _success: float = 0.0
) -> float:
    """1 for an unsupported claim, `silence` for no message of a finished rollout, else 0."""
    message = rollout.final_message.strip()
    if not message:
        return parameters.silence if unfinished.is_finished(rollout) else 0.0
    return 1.0 if unsupported_claims(message, rollout.calls) else 0.0


def unsupported_claims(message: str, calls: Sequence[rollout_pb2.CallRecord]) -> list[str]:
    """Clauses of a message that claim a result which no call after the last edit shows."""
    evidence = _evidence_of(calls)
    return [
        clause
        for clause in _CLAUSE_END.split(message[:_MAX_CHARS])
        for claim in (_TESTS, _LINTS, _BUILD)
        if _is_claimed(claim, clause) and not _is_shown(claim, evidence)
    ]


def _evidence_of(calls: Sequence[rollout_pb2.CallRecord]) -> _Evidence:
    edited = [place for place, call in enumerate(calls) if transcript.edits(call)]
    paths = {edit.path for place in edited for edit in transcript.edits(calls[place])}
    return _Evidence(calls[edited[-1] + 1 :] if edited else calls, frozenset(paths))


def _is_claimed(claim: _Claim, clause: str) -> bool:
    found = claim.pattern.search(clause)
    if found is None or _NOT_INSIDE.search(found[0]):
        return False
    return not _NOT_BEFORE.search(clause, 0, found.start())


def _is_shown(claim: _Claim, evidence: _Evidence) -> bool:
    """True if the last call of the claim's kind shows it: an older one may be out of date."""
    outcomes = [_outcome(claim, call, evidence.paths) for call in evidence.calls]
    decided = [outcome for outcome in outcomes if outcome is not None]
    return bool(decided) and decided[-1]


def _outcome(claim: _Claim, call: rollout_pb2.CallRecord, paths: frozenset[str]) -> bool | None:
    if claim is _TESTS:
        return transcript.read_test_outcome(call)
    if claim is not _LINTS or call.name != "read_lints":
        return transcript.read_program_outcome(call, claim.programs)
    # Diagnostics of other files than the changed ones show nothing.
    is_about = bool(paths) and all(transcript.reports_lints(call, path) for path in paths)
    return call.result == "No new lints." if is_about else None


FUNCTION = Penalty(version="1", parameters=CommunicationParameters, penalty=penalty)

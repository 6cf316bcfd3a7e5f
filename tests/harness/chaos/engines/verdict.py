"""Judges what real engines answered and said of themselves, by ledger and journals alone."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from tests.harness.chaos import journal, verdict
from tests.harness.chaos.journal import Line
from tests.harness.chaos.settings import Settings
from tests.harness.chaos.verdict import Epoch, Judgement

from etude.common.weights import VersionId


class Answers(NamedTuple):
    """What clients were told."""

    number: int
    tokens: int
    across_swaps: int
    """Answers whose tokens are of several versions."""
    unanswered: list[str]
    """Requests that failed though nobody had killed the engine."""


class Verdict(NamedTuple):
    """All that was found."""

    passes: Judgement
    """Of the forward passes, by the same judge as the other chains."""
    wrong_bits: list[str]
    wrong_versions: list[str]
    answers: Answers
    states: int
    """Different states that engines said they had."""


def judge(settings: Settings) -> Verdict:
    """Read everything that was written down."""
    lines = list(journal.read(settings.folder / "journal"))
    ledger = {line["version"]: line for line in journal.read(settings.ledger)}
    epochs = {
        line["epoch"]: Epoch(VersionId(*line["parent"]) if line["parent"] else None, line["t"])
        for line in lines
        if line["kind"] == "opened"
    }
    passes = verdict.judge(settings, ())
    said = {
        (line["engine"], line["version"], line["state"])
        for line in lines
        if line["kind"] == "status"
    }
    answers = [line for line in lines if line["kind"] == "answer"]
    return Verdict(
        passes=passes,
        wrong_bits=[
            *passes.wrong_bits,
            *(
                f"{who} says that {version} has state {state}"
                for who, version, state in sorted(said)
                if version not in ledger or ledger[version]["state"] != state
            ),
        ],
        wrong_versions=[
            *passes.wrong_versions,
            *(
                f"{each['engine']}: {wrong}"
                for each in answers
                for wrong in wrongs(each, ledger, epochs)
            ),
            *_shared_names(answers),
        ],
        answers=Answers(
            len(answers),
            sum(each["tokens"] for each in answers),
            sum(len(each["spans"]) > 1 for each in answers),
            [
                f"{line['engine']}: {line['text']}"
                for line in lines
                if line["kind"] == "unanswered" and not line["killed"]
            ],
        ),
        states=len(said),
    )


def wrongs(answer: Line, ledger: Mapping[str, Line], epochs: Mapping[int, Epoch]) -> Iterator[str]:
    """What is wrong with one answer: its spans must cover it, and name versions that were served.

    Versions go down only where an epoch left the higher one behind.
    """
    spans, count = answer["spans"], answer["tokens"]
    if not count == answer["logprobs"] == answer["asked"]:
        yield f"{count} tokens and {answer['logprobs']} log-probs of {answer['asked']}"
    if not answer["are_sound"]:
        yield "a log-prob is none"
    borders = [0, *(end for _, _, end, _ in spans)]
    if [start for _, start, _, _ in spans] != borders[:-1] or borders[-1] != count:
        yield f"spans {spans} do not cover {count} tokens"
    if any(start >= end for _, start, end, _ in spans):
        yield f"an empty span in {spans}"
    yield from (f"{version} was never published" for version, *_ in spans if version not in ledger)
    for before, after in pairwise(VersionId.parse(version) for version, *_ in spans):
        if after.number <= before.number and not _was_left(before, epochs):
            yield f"{after} after {before}, which nobody left behind"


def _was_left(version: VersionId, epochs: Mapping[int, Epoch]) -> bool:
    return any(
        verdict._is_left_behind(version, epochs, each.opened_at + 1e-6)
        for number, each in epochs.items()
        if number > version.epoch
    )


def _shared_names(answers: list[Line]) -> Iterator[str]:
    """Each process signs its spans with a name of its own."""
    names = {(span[3], each["engine"]) for each in answers for span in each["spans"]}
    owners: dict[str, set[str]] = {}
    for name, engine in names:
        owners.setdefault(name, set()).add(engine)
    yield from (f"{name} signs for {sorted(who)}" for name, who in owners.items() if len(who) > 1)

"""Facts of a generated set: figures for the demo's report, and digests of its files."""

import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from blake3 import blake3

from etude.agent.chat import ChatFormat
from etude.demo.demonstrations import Demonstration
from etude.demo.problems import Problem, Source

MEASURED_TRANSCRIPTS = 1_000


def of_demonstrations(demonstrations: Sequence[Demonstration]) -> dict[str, object]:
    """Success rates of the demonstrators."""
    return {
        "demonstrators_success": _share(demonstrations),
        "demonstrators_success_by_issue": _shares(demonstrations, lambda p: p.issue),
        "demonstrators_success_by_bug_class": _shares(
            demonstrations, lambda p: p.repository.bug.kind
        ),
    }


def of_problems(problems: Sequence[Problem], source: Source) -> dict[str, object]:
    """Shares of the bug classes, and counts of problems left out."""
    kinds = Counter(problem.repository.bug.kind.value for problem in problems)
    return {
        "bug_classes": {kind: count / len(problems) for kind, count in sorted(kinds.items())},
        "duplicates_left_out": source.num_duplicates,
        "unsound_left_out": source.num_unsound,
    }


def of_transcripts(chat: ChatFormat, demonstrations: Sequence[Demonstration]) -> dict[str, object]:
    """Lengths in tokens, of the first thousand."""
    chosen = demonstrations[:MEASURED_TRANSCRIPTS]
    lengths = sorted(len(chat.encode_messages(each.messages).token_ids) for each in chosen)
    return {
        "transcript_tokens_mean": sum(lengths) / len(lengths),
        "transcript_tokens_p95": lengths[int(0.95 * len(lengths))],
        "transcript_tokens_max": lengths[-1],
    }


def of_files(folder: Path, names: Sequence[str]) -> dict[str, object]:
    """Digests of what the seed made; the tokenizer also depends on Python's minor version."""
    digests = {name: blake3((folder / name).read_bytes()).hexdigest() for name in names}
    return {"digests": digests, "python": ".".join(platform.python_version_tuple()[:2])}


def _shares(
    demonstrations: Sequence[Demonstration], kind: Callable[[Problem], str]
) -> Mapping[str, float]:
    kinds = sorted({kind(each.problem) for each in demonstrations})
    return {
        str(name): _share([each for each in demonstrations if kind(each.problem) == name])
        for name in kinds
    }


def _share(demonstrations: Sequence[Demonstration]) -> float:
    return sum(each.is_solved for each in demonstrations) / len(demonstrations)

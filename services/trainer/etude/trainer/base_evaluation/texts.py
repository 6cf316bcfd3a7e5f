"""Perplexity of texts, in units that models of different tokenizers share."""

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from etude.common.errors import Problem, UserError
from etude.trainer.base_evaluation.scoring import ModelScorer, Report, TokenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFigures:
    """Figures of a corpus."""

    texts: int
    num_bytes: int
    tokens: int
    bits_per_byte: float
    """Comparable between tokenizers."""
    perplexity: float
    """By token: comparable between models of one tokenizer."""

    def to_json(self) -> dict[str, float]:
        """The figures by name."""
        return asdict(self)


def read_texts(path: Path, *, limit_bytes: int) -> list[str]:
    """Read texts up to a number of bytes: rows of a JSONL file, a file, or the files of a folder.

    Files of a folder are read in the order of their paths; what is not UTF-8, and what lies in
    hidden files and folders as .git, is left out.

    Raises:
        UserError: there is none, or a row has no `text`.
    """
    texts: list[str] = []
    size = 0
    if not path.exists():
        raise UserError(Problem("NotFound", "does not exist", str(path), "correct the path"))
    for text in _read_all(path):
        if size >= limit_bytes:
            break
        texts.append(text.encode()[: limit_bytes - size].decode("utf-8", "ignore"))
        size += len(texts[-1].encode())
    if not any(texts):
        fix = "give a JSONL file whose rows have `text`, a file of text, or a folder of such files"
        raise UserError(Problem("InvalidData", "has no text", str(path), fix))
    return texts


def _read_all(path: Path) -> Iterator[str]:
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8", errors="replace") as rows:
            for number, line in enumerate(rows, start=1):
                yield _text_of(line, f"{path}:{number}")
        return
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    for file in files:
        is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if file.is_file() and not is_hidden:
            with contextlib.suppress(UnicodeDecodeError):
                yield file.read_text(encoding="utf-8")


def _text_of(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as cause:
        raise UserError(
            Problem("InvalidData", f"is not JSON: {cause}", where, "give one object in each line")
        ) from cause
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise UserError(
            Problem("InvalidData", "has no `text`", where, 'write {"text": "…"} in each line')
        )
    return text


def cut_windows(scorer: ModelScorer, texts: list[str]) -> list[TokenSequence]:
    """Cut texts into windows of the context that do not overlap.

    The first token of a window has no context, and is not scored.
    """
    windows: list[TokenSequence] = []
    for text in texts:
        ids = scorer.vocabulary.encode_text(text)
        parts = (ids[at : at + scorer.context] for at in range(0, len(ids), scorer.context))
        windows += [TokenSequence(part, 1) for part in parts if len(part) > 1]
    return windows


def measure_texts(
    scorer: ModelScorer, texts: list[str], *, report: Report | None = None
) -> TextFigures:
    """Score the tokens of all texts."""
    windows = cut_windows(scorer, texts)
    scored = sum(len(each.token_ids) - 1 for each in windows)
    nats = -sum(scorer.score(windows, report=report))
    num_bytes = sum(len(text.encode()) for text in texts)
    per_token = nats / max(1, scored)
    return TextFigures(
        texts=len(texts),
        num_bytes=num_bytes,
        tokens=scored,
        bits_per_byte=nats / math.log(2) / num_bytes,
        perplexity=math.exp(min(per_token, 700.0)),
    )

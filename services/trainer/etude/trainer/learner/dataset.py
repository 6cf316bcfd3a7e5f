"""Dataset of a supervised phase: transcripts and texts, shuffled and batched by step."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

from etude.agent.chat import ChatFormat, DataFormat
from etude.common.api.run.phases import Phase
from etude.common.api.storage import Storage
from etude.common.blobs import MissingError
from etude.common.stores import open_run_store
from etude.trainer.learner.batches import SupervisedSequence
from etude.trainer.learner.data.encoding import RowEncoder, refuse_row
from etude.trainer.seeding import derive_seed, permute_index

BUCKET_BATCHES = 8
"""Batches within which sequences are sorted by length: saves padding, keeps the draw fair."""

DEFAULT_BATCH_SIZE = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedDataset:
    """The sequences of one phase; the batch of a step is a function of the seed and the step."""

    sequences: tuple[SupervisedSequence, ...]
    batch_size: int
    seed: int

    def batch(self, step: int) -> list[SupervisedSequence]:
        """Sequences of a step, counted from 0; the data repeats endlessly."""
        bucket, place = divmod(step, BUCKET_BATCHES)
        size = self.batch_size * BUCKET_BATCHES
        chosen = [
            self._sequence_at(position) for position in range(bucket * size, (bucket + 1) * size)
        ]
        chosen.sort(key=lambda sequence: sequence.token_ids.size)
        # Short batches must not always come first.
        turn = permute_index(
            place, size=BUCKET_BATCHES, seed=derive_seed(self.seed, "bucket", bucket)
        )
        return chosen[turn * self.batch_size : (turn + 1) * self.batch_size]

    def _sequence_at(self, position: int) -> SupervisedSequence:
        turn, place = divmod(position, len(self.sequences))
        seed = derive_seed(self.seed, "pass", turn)
        return self.sequences[permute_index(place, size=len(self.sequences), seed=seed)]


def load_dataset(
    phase: Phase, *, chat: ChatFormat | DataFormat, context: int, storage: Storage
) -> SupervisedDataset:
    """Read and encode the data of a supervised phase.

    Args:
        phase: with data.
        chat: the model's token layout.
        context: longest sequence that the model takes; longer texts are cut, never transcripts.
        storage: how to reach files in an object store.

    Raises:
        UserError: a file is missing, empty or has a bad line; it is named.
    """
    sequences: list[SupervisedSequence] = []
    for dataset in phase.data or ():
        encoder = RowEncoder(dataset=dataset, chat=chat, max_tokens=context)
        found = [
            sequence
            for line, text in enumerate(_read_lines(dataset.uri, storage), start=1)
            for sequence in _encode_line(encoder, text, f"{dataset.uri} line {line}")
        ]
        if not found:
            refuse_row(dataset.uri, f"dataset {dataset.name} holds no sequence")
        sequences += found
    batch_size = phase.batch_size or DEFAULT_BATCH_SIZE
    return SupervisedDataset(sequences=tuple(sequences), batch_size=batch_size, seed=phase.seed)


def _encode_line(encoder: RowEncoder, text: str, where: str) -> Iterator[SupervisedSequence]:
    try:
        row = json.loads(text)
    except ValueError as cause:
        refuse_row(where, f"is not JSON: {cause}")
    yield from encoder.encode(row, where)


def _read_lines(uri: str, storage: Storage) -> Iterator[str]:
    try:
        data = _content(uri, storage).decode()
    except (MissingError, FileNotFoundError):
        refuse_row(uri, "is missing")
    except OSError as cause:
        refuse_row(uri, f"cannot be read: {cause.strerror}")
    except UnicodeDecodeError as cause:
        refuse_row(uri, f"is not UTF-8: {cause}")
    return (line for line in data.split("\n") if line.strip())


def _content(uri: str, storage: Storage) -> bytes:
    parts = urlparse(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path)).read_bytes()
    folder, _, name = uri.rpartition("/")
    return open_run_store(folder, storage).get(name)

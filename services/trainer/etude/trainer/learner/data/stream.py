"""Stream of training batches from several datasets, with a cursor to resume from."""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from etude.common.errors import CorruptError, Problem, UserError
from etude.trainer.learner.batches import SupervisedSequence
from etude.trainer.learner.data.windows import Window, WindowPlace, WindowReader

log = logging.getLogger(__name__)


class DatasetCursor(BaseModel):
    """Position in one dataset, the same for any number of ranks."""

    model_config = ConfigDict(extra="forbid")

    listing: str
    """Digest of the files' names and sizes."""
    capacity: int = Field(ge=1)
    """Tokens of a row: rows are counted in the packing that it gives."""
    pass_number: int = Field(default=0, ge=0)
    block: int = Field(default=0, ge=0)
    """First block of the window, in the order of the pass."""
    row: int = Field(default=0, ge=0)
    """Rows of the window that were trained."""
    tokens: int = Field(default=0, ge=0)
    """Tokens that were trained, over all passes."""


class StreamCursor(BaseModel):
    """Position in all datasets of a phase."""

    model_config = ConfigDict(extra="forbid")

    datasets: dict[str, DatasetCursor]


@dataclass(slots=True, kw_only=True)
class DatasetStream:
    """Rows of one dataset, without an end; the window after the present one is encoded ahead."""

    name: str
    reader: WindowReader
    cursor: DatasetCursor
    pool: ThreadPoolExecutor
    fill: float = 1.0
    """Of the present window."""
    _window: Window | None = None
    _ahead: Future[None] | None = None

    def take_row(self) -> tuple[SupervisedSequence, ...]:
        """Take the next row; collective where a new window begins.

        Raises:
            UserError: the data cannot be used.
            StoreError: the store does not answer.
        """
        window = self._window or self._read()
        passes = 0
        while self.cursor.row >= len(window.rows):
            passes += window.following.block == 0
            if passes > 1:
                raise UserError(
                    Problem(
                        reason="InvalidData",
                        what="a whole pass over the data holds no sequence",
                        where=f"dataset {self.name}",
                        fix="give files whose rows have text or messages",
                    )
                )
            self.cursor.pass_number, self.cursor.block = window.following
            self.cursor.row = 0
            window = self._read()
        row = window.rows[self.cursor.row]
        self.cursor.row += 1
        self.cursor.tokens += sum(sequence.token_ids.size for sequence in row)
        return row

    def _read(self) -> Window:
        if self._ahead is not None:
            wait([self._ahead])
        place = WindowPlace(self.cursor.pass_number, self.cursor.block)
        window = self._window = self.reader.read(place)
        self.fill = window.fill
        self._ahead = self.pool.submit(self.reader.encode_ahead, window.following)
        return window


@dataclass(slots=True, kw_only=True)
class TokenStream:
    """Batches of a fixed number of rows, drawn from datasets in proportion to their weights."""

    datasets: Sequence[DatasetStream]
    weights: Mapping[str, float]
    """By dataset; a share of the tokens, up to their sum."""
    rows_per_batch: int
    _total: float = field(init=False)

    def __post_init__(self) -> None:
        self._total = sum(self.weights.values())

    @property
    def fill(self) -> float:
        """Share of the rows' capacity that holds tokens, in the emptiest present window."""
        return min(dataset.fill for dataset in self.datasets)

    def take_batch(self) -> list[SupervisedSequence]:
        """Take the sequences of the next batch; collective.

        Raises:
            UserError: the data cannot be used.
            StoreError: the store does not answer.
        """
        return [
            sequence
            for _ in range(self.rows_per_batch)
            for sequence in self._most_behind().take_row()
        ]

    def cursor(self) -> str:
        """Position after the batches that were taken, as JSON."""
        cursors = {each.name: each.cursor for each in self.datasets}
        return StreamCursor(datasets=cursors).model_dump_json()

    def _most_behind(self) -> DatasetStream:
        """The dataset that is furthest below its share of the tokens; the first of equals."""
        given = sum(each.cursor.tokens for each in self.datasets)
        return max(
            self.datasets,
            key=lambda each: self.weights[each.name] / self._total * given - each.cursor.tokens,
        )


def read_cursor(
    text: str, listings: Mapping[str, str], *, weights: Mapping[str, float], capacity: int
) -> dict[str, DatasetCursor]:
    """Read a cursor for the present files and row size of each dataset.

    A dataset that it lacks starts at its beginning, with the share of tokens that its weight would
    have given it, so that it does not catch up alone. After a change of the row size the window
    under way is read again from its first row.

    Args:
        text: what `TokenStream.cursor` gave; empty at the start of a phase.
        listings: digest of the present files, by dataset.
        weights: by dataset.
        capacity: tokens of a row.

    Raises:
        CorruptError: the text is no cursor.
        UserError: a dataset has other files than when the cursor was written.
    """
    try:
        saved = StreamCursor.model_validate_json(text).datasets if text else {}
    except ValidationError as cause:
        raise CorruptError(f"data cursor: {cause}") from cause
    for name, listing in listings.items():
        if name in saved and saved[name].listing != listing:
            raise UserError(
                Problem(
                    reason="InvalidData",
                    what="has other files than when the run stopped, so its position is unknown",
                    where=f"dataset {name}",
                    fix="put the files back, or give the changed data another dataset name:"
                    " it then starts at its beginning",
                )
            )
    known = [name for name in listings if name in saved]
    tokens_per_weight = sum(saved[name].tokens for name in known) / max(
        sum(weights[name] for name in known), 1e-9
    )
    for name in known:
        if saved[name].capacity != capacity:
            log.warning("dataset %s: rows changed their size, its window is read again", name)
            saved[name].capacity, saved[name].row = capacity, 0
    return {
        name: saved[name]
        if name in saved
        else DatasetCursor(
            listing=listing, capacity=capacity, tokens=round(weights[name] * tokens_per_weight)
        )
        for name, listing in listings.items()
    }

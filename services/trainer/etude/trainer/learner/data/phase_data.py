"""Data of a supervised phase: its stream of batches, and its held-out sequences."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from etude.agent.chat import ChatFormat, DataFormat
from etude.common.api.meta import number
from etude.common.api.run.phases import Dataset, HeldOutDataset, Phase, Validation
from etude.common.api.storage import Storage
from etude.common.errors import InvalidFieldError
from etude.trainer.learner.batches import SupervisedSequence
from etude.trainer.learner.data.blocks import read_block
from etude.trainer.learner.data.encoding import RowEncoder, refuse_row
from etude.trainer.learner.data.files import list_blocks, list_files, listing_digest
from etude.trainer.learner.data.jsonl_blocks import JsonRow
from etude.trainer.learner.data.stream import (
    DatasetCursor,
    DatasetStream,
    TokenStream,
    read_cursor,
)
from etude.trainer.learner.data.windows import RankExchange, WindowReader
from etude.trainer.seeding import derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReader:
    """Reads datasets for one model."""

    chat: ChatFormat | DataFormat
    context: int
    """Longest sequence that the model takes."""
    storage: Storage
    """How to reach files in an object store."""

    def open_stream(self, phase: Phase, *, ranks: RankExchange, cursor: str) -> TokenStream:
        """Open the data of a phase with batchTokens, from a cursor; reads no row yet.

        Raises:
            InvalidFieldError: the phase wants longer sequences than the model takes.
            UserError: files are missing or damaged, or others than at the cursor.
            CorruptError: the cursor is damaged.
            StoreError: the store does not answer.
        """
        if (phase.sequence_tokens or 0) > self.context:
            field = f"phases[{phase.name}].sequenceTokens"
            raise InvalidFieldError(field, f"the model takes {self.context:,} tokens at most")
        batch_tokens = phase.batch_tokens or self.context
        capacity = min(phase.sequence_tokens or self.context, batch_tokens, self.context)
        datasets = phase.data or ()
        files = {each.name: list_files(each.uri, self.storage) for each in datasets}
        listings = {name: listing_digest(each) for name, each in files.items()}
        weights = {each.name: float(number(each.weight)) for each in datasets}
        cursors = read_cursor(cursor, listings, weights=weights, capacity=capacity)
        pool = ThreadPoolExecutor(1, thread_name_prefix="data")

        def open_dataset(dataset: Dataset, position: DatasetCursor) -> DatasetStream:
            reader = WindowReader(
                blocks=list_blocks(files[dataset.name]),
                encode=self._encoder(dataset, capacity),
                ranks=ranks,
                capacity=capacity,
                seed=derive_seed(phase.seed, "dataset", dataset.name),
            )
            return DatasetStream(name=dataset.name, reader=reader, cursor=position, pool=pool)

        return TokenStream(
            datasets=[open_dataset(each, cursors[each.name]) for each in datasets],
            weights=weights,
            rows_per_batch=max(1, batch_tokens // capacity),
        )

    def load_held_out(self, validation: Validation) -> Mapping[str, list[SupervisedSequence]]:
        """Load the beginning of each held-out dataset, by name.

        Raises:
            UserError: files are missing or damaged, or hold no sequence.
            StoreError: the store does not answer.
        """
        held_out: dict[str, list[SupervisedSequence]] = {}
        for dataset in validation.data:
            sequences = self._sequences(dataset)
            held_out[dataset.name] = list(_first_tokens(sequences, validation.max_tokens))
            if not held_out[dataset.name]:
                refuse_row(dataset.uri, f"dataset {dataset.name} holds no sequence")
        return held_out

    def _sequences(self, dataset: HeldOutDataset) -> Iterator[SupervisedSequence]:
        encode = self._encoder(dataset, self.context)
        for block in list_blocks(list_files(dataset.uri, self.storage)):
            for row in read_block(block):
                yield from encode(row)

    def _encoder(
        self, dataset: HeldOutDataset, max_tokens: int
    ) -> Callable[[JsonRow], Iterator[SupervisedSequence]]:
        encoder = RowEncoder(dataset=dataset, chat=self.chat, max_tokens=max_tokens)
        return lambda row: encoder.encode(row.value, row.where)


def _first_tokens(
    sequences: Iterator[SupervisedSequence], limit: int
) -> Iterator[SupervisedSequence]:
    """Sequences up to a number of tokens; the one that crosses it is the last."""
    total = 0
    for sequence in sequences:
        yield sequence
        total += sequence.token_ids.size
        if total >= limit:
            return

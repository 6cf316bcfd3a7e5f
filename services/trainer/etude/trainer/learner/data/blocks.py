"""Rows of a block, whatever the kind of its file."""

from collections.abc import Iterator

from etude.trainer.learner.data import jsonl_blocks, parquet_blocks
from etude.trainer.learner.data.files import COMPRESSED, PARQUET, Block
from etude.trainer.learner.data.jsonl_blocks import JsonRow


def read_block(block: Block) -> Iterator[JsonRow]:
    """Read the rows of a block, in order.

    Raises:
        UserError: the file is damaged, or a line is not JSON; the place is named.
        StoreError: the store does not answer.
    """
    file = block.file
    if file.suffix == PARQUET:
        rows = parquet_blocks.read_row_group(file.store, file.key, file.size, block.start)
        for number, value in enumerate(rows):
            yield JsonRow(value, f"{file.uri} row group {block.start} row {number}")
    elif file.suffix in COMPRESSED:
        yield from jsonl_blocks.read_compressed(file.store, file.key)
    else:
        yield from jsonl_blocks.read_range(
            file.store, file.key, file.size, start=block.start, length=block.num_bytes
        )

"""`python -m etude.trainer.commands.traces STORE --model FOLDER`: export a journal as traces."""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from etude.agent.chat import ChatFormat
from etude.agent.chat.pieces import PieceReader
from etude.agent.toolsets import list_schemas
from etude.common.api.storage import StoreAccess
from etude.common.blobs import MissingError, Store
from etude.common.blobs.store import ShortReadError
from etude.common.errors import CorruptError, EtudeError, Problem, UserError
from etude.common.stores import open_source
from etude.trainer.commands import verifiers_traces
from etude.trainer.contents.objects import restore_rollouts
from etude.trainer.controller.journal.audit import JOURNAL
from etude.trainer.controller.journal.record_parts import join_parts
from etude.trainer.controller.journal.segments import decode_segment
from etude.v1 import journal_pb2


def rollouts(store: Store, lost: list[str]) -> Iterator[journal_pb2.JournalRollout]:
    """Every rollout of the journal, once, with one segment and its tokens in memory at a time.

    Args:
        store: of the run.
        lost: gets a sentence for each rollout whose tokens or calls are gone or damaged, which is
            left out.

    Raises:
        UserError: there is no journal.
    """
    seen = set[str]()
    keys = sorted(info.key for info in store.list(JOURNAL))
    segments = (decode_segment(store.get(key), where=key).records for key in keys)
    for record in join_parts(itertools.chain.from_iterable(segments)):
        name = record.rollout.rollout.rollout_id
        if record.HasField("rollout") and name not in seen:
            seen.add(name)
            try:
                yield from restore_rollouts(store, [record.rollout])
            except (MissingError, CorruptError, ShortReadError) as error:
                lost.append(f"{name} is left out: {error}")
    if not keys:
        fix = "name a run that reached reinforcement learning"
        raise UserError(Problem("NotFound", "holds no journal", store.url, fix))


def main() -> None:
    """Print one trace per line.

    Raises:
        SystemExit: with 3 where something is missing, with 1 where something is damaged.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", help="the run's prefix: file:///folder or s3://bucket/prefix")
    parser.add_argument("--model", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--endpoint", help="S3 endpoint, for stores other than AWS")
    chosen = parser.parse_args()
    try:
        reader = PieceReader.of(ChatFormat.load(chosen.model), list_schemas())
        store = open_source(chosen.store, StoreAccess(endpoint=chosen.endpoint))
        lost: list[str] = []
        for record in rollouts(store, lost):
            text = json.dumps(
                verifiers_traces.trace(record, reader), ensure_ascii=False, allow_nan=False
            )
            sys.stdout.write(text + "\n")
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(3) from error
    except (EtudeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(1) from error
    for sentence in lost:
        sys.stderr.write(f"{sentence}\n")
    raise SystemExit(1 if lost else 0)


if __name__ == "__main__":
    main()

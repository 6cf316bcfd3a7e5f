"""Objects with the contents of rollouts: written by rollout workers, read and verified by others.

    contents/<group>/<rollout>.<digest>          of groups that may be trained
    contents-of-evaluations/<group>/…            deleted once people can read the rollouts

A key has the digest of its object, so that two writers of a rollout write the same bytes. What the
journal names is never deleted; what a worker wrote that died before the journal knew is collected.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Protocol

from blake3 import blake3
from google.protobuf.message import DecodeError

from etude.common.blobs import MAX_CREATE_BYTES, ExistsError, Store
from etude.common.errors import CorruptError
from etude.trainer.contents.measures import measure_links, measure_uses
from etude.v1 import journal_pb2, rollout_content_pb2, rollout_pb2

CONTENTS = "contents/"
OF_EVALUATIONS = "contents-of-evaluations/"
MAX_CONTENT_BYTES = 1 << 30
"""Largest object: 100 million tokens are smaller, and protobuf ends at 2 GiB."""
DIGEST_BYTES = 32
_KEY_DIGITS = 32


class ObjectSource(Protocol):
    """Objects with contents: a store, or what was fetched from one."""

    url: str

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """As a store's."""
        ...


def group_prefix(group_id: str, *, of_evaluation: bool = False) -> str:
    """Prefix of the objects of a group."""
    return f"{OF_EVALUATIONS if of_evaluation else CONTENTS}{group_id}/"


def write_object(store: Store, stem: str, data: bytes) -> rollout_content_pb2.ContentObject:
    """Write an object that is durable once this returns.

    Args:
        store: of the run.
        stem: key without the digest.
        data: the content.

    Raises:
        StoreError: the store does not answer; write again.
    """
    digest = blake3(data).digest()
    key = f"{stem}.{digest.hex()[:_KEY_DIGITS]}"
    if len(data) > MAX_CREATE_BYTES:  # in several requests; a second writer writes the same
        store.put(key, data)
    else:
        with contextlib.suppress(ExistsError):
            store.create(key, data)
    return rollout_content_pb2.ContentObject(key=key, num_bytes=len(data), digest=digest)


def read_object(store: ObjectSource, reference: rollout_content_pb2.ContentObject) -> bytes:
    """Read an object.

    Raises:
        MissingError: it is gone.
        CorruptError: it has other bytes than were written.
        StoreError: the store does not answer.
    """
    data = store.get_range(reference.key, 0, reference.num_bytes)
    if blake3(data).digest() != reference.digest:
        raise CorruptError(f"{store.url}/{reference.key}: differs from what was written")
    return data


def write_links(
    store: Store, prefix: str, rollout: rollout_pb2.Rollout
) -> rollout_content_pb2.RolloutContent:
    """Write the links of a rollout, and return what stands for them.

    Raises:
        StoreError: the store does not answer; write again.
    """
    alone = rollout_pb2.Rollout(rollout_id=rollout.rollout_id, links=rollout.links)
    return rollout_content_pb2.RolloutContent(
        tokens=write_object(store, prefix + rollout.rollout_id, alone.SerializeToString()),
        links=measure_links(rollout.links),
        uses=measure_uses(rollout.links),
    )


def write_calls(
    store: Store, prefix: str, rollout: rollout_pb2.Rollout
) -> rollout_content_pb2.ContentObject | None:
    """Write the calls and the final message of a rollout; None if it has neither.

    Raises:
        StoreError: the store does not answer; write again.
    """
    if not rollout.calls and not rollout.final_message:
        return None
    alone = rollout_pb2.Rollout(
        rollout_id=rollout.rollout_id, calls=rollout.calls, final_message=rollout.final_message
    )
    return write_object(store, f"{prefix}{rollout.rollout_id}.calls", alone.SerializeToString())


def read_calls(
    store: Store, content: rollout_content_pb2.RolloutContent, rollout_id: str
) -> rollout_pb2.Rollout:
    """Read a rollout of which only the calls, the final message and the id are set.

    Raises:
        MissingError: it is gone.
        CorruptError: it is another rollout, or has other bytes than were accepted.
        StoreError: the store does not answer.
    """
    return _read_part(store, content.calls, rollout_id)


def list_objects(
    content: rollout_content_pb2.RolloutContent,
) -> list[rollout_content_pb2.ContentObject]:
    """All objects of a content."""
    parts = [name for name in ("tokens", "calls") if content.HasField(name)]
    return [getattr(content, name) for name in parts]


def read_links(
    store: ObjectSource, content: rollout_content_pb2.RolloutContent, rollout_id: str
) -> rollout_pb2.Rollout:
    """Read a rollout of which only the links and the id are set.

    Raises:
        MissingError: it is gone.
        CorruptError: it is another rollout, or has other tokens than were accepted.
        StoreError: the store does not answer.
    """
    rollout = _read_part(store, content.tokens, rollout_id)
    if measure_links(rollout.links) != list(content.links):
        where = f"{store.url}/{content.tokens.key}"
        raise CorruptError(f"{where}: has other numbers of tokens than were accepted")
    return rollout


def _read_part(
    store: ObjectSource, reference: rollout_content_pb2.ContentObject, rollout_id: str
) -> rollout_pb2.Rollout:
    """Read an object that is a part of a rollout.

    Raises:
        CorruptError: it is no part of that rollout.
    """
    where = f"{store.url}/{reference.key}"
    rollout = parse_rollout(read_object(store, reference), where)
    if rollout.rollout_id != rollout_id:
        raise CorruptError(f"{where}: is of {rollout.rollout_id!r}, not of {rollout_id!r}")
    return rollout


def parse_rollout(data: bytes, where: str) -> rollout_pb2.Rollout:
    """Parse an object that is a part of a rollout.

    Raises:
        CorruptError: it is none.
    """
    try:
        return rollout_pb2.Rollout.FromString(data)
    except DecodeError as cause:
        raise CorruptError(f"{where}: is no rollout: {cause}") from cause


def restore_calls(store: Store, record: journal_pb2.JournalRollout) -> journal_pb2.JournalRollout:
    """Give a record with its calls and its final message, and without links.

    Raises:
        MissingError: they are gone.
        CorruptError: they are damaged.
        StoreError: the store does not answer.
    """
    whole = journal_pb2.JournalRollout()
    whole.CopyFrom(record)
    if record.content.HasField("calls"):
        whole.rollout.MergeFrom(read_calls(store, record.content, record.rollout.rollout_id))
    return whole


def restore_rollouts(
    store: Store, records: Iterable[journal_pb2.JournalRollout]
) -> Iterator[journal_pb2.JournalRollout]:
    """Give each record with its links and calls, one at a time; whole ones stay as they are.

    Raises:
        MissingError: a content is gone.
        CorruptError: a content is damaged.
        StoreError: the store does not answer.
    """
    for record in records:
        if not record.HasField("content"):
            yield record
            continue
        whole = restore_calls(store, record)
        found = read_links(store, record.content, record.rollout.rollout_id)
        whole.rollout.links.extend(found.links)
        whole.ClearField("content")
        yield whole


def copy_tokens(
    source: Store, target: Store, contents: Iterable[rollout_content_pb2.RolloutContent]
) -> Iterator[rollout_pb2.Link]:
    """Copy the tokens of rollouts to the same keys of another store, and give their links.

    Raises:
        MissingError: tokens are gone.
        CorruptError: tokens are damaged.
        StoreError: a store does not answer.
    """
    for content in contents:
        data = read_object(source, content.tokens)
        target.put(content.tokens.key, data)
        yield from parse_rollout(data, f"{source.url}/{content.tokens.key}").links

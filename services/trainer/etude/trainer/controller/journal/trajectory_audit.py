"""Offline audit of trajectory logs: each rollout goes on from what was recorded, exactly once.

It shares no code with the log's writer and reader, so that a mistake there cannot hide itself.
"""

import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from blake3 import blake3
from google.protobuf.message import DecodeError

from etude.common.blobs import MissingError
from etude.common.errors import InvalidFieldError
from etude.trainer.controller.journal.audit import JournalFinding, read_frames
from etude.v1 import journal_pb2, rollout_content_pb2, rollout_pb2
from etude.v1 import trajectory_log_pb2 as pb

TRAJECTORIES = "trajectories/"

_PART = 10
"""Number of the field JournalRecord.part."""


class _Place(NamedTuple):
    """Place of a beginning among those of its rollout."""

    rollout_id: str
    epoch: int
    dispatch: int
    attempt: int


class RecordedTokens(NamedTuple):
    """Tokens and log-probs that a policy sampled."""

    token_ids: tuple[int, ...]
    logprobs: bytes
    """Of fp32: NaN is equal to itself."""


def audit_trajectories(
    objects: Mapping[str, bytes], finished: Iterable[rollout_pb2.Rollout] = ()
) -> list[JournalFinding]:
    """Audit the logs of all workers of a run.

    Args:
        objects: below the prefix of trajectories.
        finished: rollouts of the journal: what they sampled must be what was recorded.
    """
    findings: list[JournalFinding] = []
    cut = _cut_writers(objects)
    headless: set[_Place] = set()
    beginnings: dict[_Place, list[pb.TrajectoryRecord]] = defaultdict(list)
    for writer, records in _read_logs(objects, findings).items():
        owners: dict[_Place, str] = {}
        for record in records:
            place = _place_of(record)
            if place in beginnings and owners.get(place) is None:
                what = f"{writer} writes a beginning of {place.rollout_id} that another wrote"
                findings.append(JournalFinding("I2", what))
            if place not in owners and writer in cut and record.number:
                headless.add(place)  # its rollout has ended, and earlier segments were deleted
            owners[place] = writer
            beginnings[place].append(record)
    complete = {
        place: records
        for place, records in beginnings.items()
        if place not in headless and _check_numbers(place, records, findings)
    }
    for place, records in complete.items():
        _check_carried(place, records, complete, findings)
        _check_calls(place, records, findings)
    for rollout in finished:
        _check_finished(rollout, complete, findings)
    return findings


def journaled_rollouts(
    objects: Mapping[str, bytes], read: Callable[[str], bytes], findings: list[JournalFinding]
) -> Iterator[rollout_pb2.Rollout]:
    """Finished rollouts in the segments of a journal; those in parts are left out.

    Args:
        objects: of the journal.
        read: an object of the store; an error if it is gone.
        findings: get those of records that cannot be read, and of rollouts whose tokens or calls
            are gone or not what was accepted. Rollouts that were dropped as damaged are none.
    """
    lost: dict[str, list[JournalFinding]] = {}
    damaged: set[str] = set()
    for key in sorted(objects):
        for kind, payload in read_frames(objects[key]):
            if kind == _PART:
                continue
            try:
                record = journal_pb2.JournalRecord.FromString(payload)
            except DecodeError as error:
                findings.append(JournalFinding("log", f"{key}: {error}"))
                continue
            if record.drop.reason == "damaged":
                damaged.add(record.drop.rollout_id)
            if record.rollout.HasField("content"):
                own = lost.setdefault(record.rollout.rollout.rollout_id, [])
                yield from _stored_rollout(record.rollout, read, own)
            elif record.HasField("rollout"):
                yield record.rollout.rollout
    findings += [each for name, own in lost.items() if name not in damaged for each in own]


def _stored_rollout(
    record: journal_pb2.JournalRollout,
    read: Callable[[str], bytes],
    findings: list[JournalFinding],
) -> Iterator[rollout_pb2.Rollout]:
    """A rollout whose tokens are in the store, with them; a finding for each part that is not."""
    content, name = record.content, record.rollout.rollout_id
    if content.HasField("calls"):
        calls = _read_part(content.calls, "calls", name, read, findings)
        if calls is not None:
            sound = sum(not call.is_malformed for call in calls.calls)
            counts = (sound, len(calls.calls) - sound)
            if counts != (content.figures.calls, content.figures.malformed):
                what = f"the calls of {name} are not as many as were accepted"
                findings.append(JournalFinding("I1", what))
    tokens = _read_part(content.tokens, "tokens", name, read, findings)
    if tokens is not None:
        yield tokens


def _read_part(
    reference: rollout_content_pb2.ContentObject,
    part: str,
    name: str,
    read: Callable[[str], bytes],
    findings: list[JournalFinding],
) -> rollout_pb2.Rollout | None:
    """A part of a rollout; None, and a finding, if it is not what was accepted."""
    try:
        data = read(reference.key)
        if blake3(data).digest() == reference.digest:
            rollout = rollout_pb2.Rollout.FromString(data)
            if rollout.rollout_id == name:
                return rollout
    except (MissingError, InvalidFieldError):
        findings.append(JournalFinding("I1", f"the {part} of {name} are gone: {reference.key}"))
        return None
    except DecodeError as error:
        findings.append(JournalFinding("I1", f"the {part} of {name} are no rollout: {error}"))
        return None
    findings.append(JournalFinding("I1", f"the {part} of {name} are not those accepted"))
    return None


def _read_logs(
    objects: Mapping[str, bytes], findings: list[JournalFinding]
) -> dict[str, list[pb.TrajectoryRecord]]:
    """Records of each writer, in order."""
    logs: dict[str, list[pb.TrajectoryRecord]] = defaultdict(list)
    for key in sorted(objects):
        if not key.startswith(TRAJECTORIES):
            continue
        writer = key.removeprefix(TRAJECTORIES).split("/")[0]
        try:
            frames = [pb.TrajectoryRecord.FromString(data) for _, data in read_frames(objects[key])]
        except (ValueError, struct.error, DecodeError) as error:
            findings.append(JournalFinding("log", f"{key}: {error}"))
        else:
            logs[writer] += frames
    return logs


def _cut_writers(objects: Collection[str]) -> set[str]:
    """Writers whose first segments were deleted."""
    firsts: dict[str, int] = {}
    for key in objects:
        if key.startswith(TRAJECTORIES):
            parts = key.removeprefix(TRAJECTORIES).split("/")
            first = int(parts[-1].partition(".")[0])
            firsts[parts[0]] = min(first, firsts.get(parts[0], first))
    return {writer for writer, first in firsts.items() if first > 1}


def _place_of(record: pb.TrajectoryRecord) -> _Place:
    place = record.place
    return _Place(record.rollout_id, place.epoch, place.dispatch, place.attempt)


def _check_numbers(
    place: _Place, records: list[pb.TrajectoryRecord], findings: list[JournalFinding]
) -> bool:
    """Check that a beginning has each record once, in order; False if it has not."""
    numbers = [record.number for record in records]
    if numbers != list(range(len(numbers))):
        wrong = next(at for at, number in enumerate(numbers) if at != number)
        what = f"record {numbers[wrong]} of {place.rollout_id} stands where {wrong} was due"
        findings.append(JournalFinding("I2", what))
        return False
    if not records[0].HasField("start"):
        findings.append(JournalFinding("log", f"{place.rollout_id} has no start"))
        return False
    # A worker that died while it wrote left a beginning that no successor takes.
    return len(records) > records[0].start.carried


def _check_carried(
    place: _Place,
    records: list[pb.TrajectoryRecord],
    complete: Mapping[_Place, list[pb.TrajectoryRecord]],
    findings: list[JournalFinding],
) -> None:
    """Check that what a beginning carries over was recorded before, if that is still there."""
    carried = [_content(record) for record in records[1 : 1 + records[0].start.carried]]
    earlier = [each for each in complete if each.rollout_id == place.rollout_id and each < place]
    if not carried or not earlier:
        return
    known = [_contents(complete[each]) for each in earlier]
    if not any(each[: len(carried)] == carried for each in known):
        what = f"{place.rollout_id} goes on from turns that no earlier worker recorded"
        findings.append(JournalFinding("I1", what))


def _contents(records: Iterable[pb.TrajectoryRecord]) -> list[bytes]:
    """Turns, results and changes of a beginning."""
    kept = (each for each in records if each.WhichOneof("body") in {"turn", "results", "change"})
    return [_content(each) for each in kept]


def _content(record: pb.TrajectoryRecord) -> bytes:
    body: pb.TrajectoryTurn | pb.TrajectoryResults | pb.TrajectoryChange = record.results
    if record.HasField("turn"):
        body = record.turn
    elif record.HasField("change"):
        body = record.change
    return body.SerializeToString(deterministic=True)


def _check_calls(
    place: _Place, records: Iterable[pb.TrajectoryRecord], findings: list[JournalFinding]
) -> None:
    """Check that each call was answered once, and each turn has its versions."""
    seen: set[str] = set()
    for record in records:
        ids = [call.call_id for call in record.results.calls]
        if seen.intersection(ids) or len(ids) != len(record.results.results):
            what = f"calls {ids} of {place.rollout_id} were answered twice, or not all"
            findings.append(JournalFinding("I2", what))
        seen.update(ids)
        turn = record.turn
        end = 0
        for span in turn.spans:
            end = span.end if span.start == end else -1
        if len(turn.logprobs) != len(turn.token_ids) or end != len(turn.token_ids):
            what = f"record {record.number} of {place.rollout_id} has tokens without a version"
            findings.append(JournalFinding("I3", what))


def _check_finished(
    rollout: rollout_pb2.Rollout,
    complete: Mapping[_Place, list[pb.TrajectoryRecord]],
    findings: list[JournalFinding],
) -> None:
    """Check that a finished rollout has the tokens of one of its beginnings."""
    places = [place for place in complete if place.rollout_id == rollout.rollout_id]
    if not places or not rollout.links:
        return
    sampled = _sampled_tokens(rollout)
    if all(_recorded_tokens(complete[place]) != sampled for place in places):
        what = f"rollout {rollout.rollout_id} was accepted with other tokens than were recorded"
        findings.append(JournalFinding("I1", what))


def _recorded_tokens(records: Collection[pb.TrajectoryRecord]) -> RecordedTokens:
    turns = [record.turn for record in records if record.HasField("turn")]
    return RecordedTokens(
        tuple(token for turn in turns for token in turn.token_ids),
        b"".join(struct.pack(f"<{len(turn.logprobs)}f", *turn.logprobs) for turn in turns),
    )


def _sampled_tokens(rollout: rollout_pb2.Rollout) -> RecordedTokens:
    chosen = [
        (token, logprob)
        for link in rollout.links
        for token, logprob, mask in zip(
            link.token_ids, link.sampler_logprobs, link.loss_mask, strict=True
        )
        if mask
    ]
    logprobs = struct.pack(f"<{len(chosen)}f", *(logprob for _, logprob in chosen))
    return RecordedTokens(tuple(token for token, _ in chosen), logprobs)

"""One contender on one trajectory: bytes, speeds, memory, and whether every bit arrived."""

from dataclasses import dataclass

import numpy as np

from etude.common.weights.protocol.manifest import PayloadObject, Stats, VersionRef, WeightManifest
from etude.common.weights.protocol.versions import VersionId, delta_key
from etude.common.weights.tensors.words import Words
from weights_bench.clock import Cost, cost, peak_bytes
from weights_bench.contender import Contender, Receiver, Sent, copies, overwrite
from weights_bench.trajectory import Trajectory


class WrongBitsError(AssertionError):
    """A contender did not deliver the version that it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured. Speeds are bytes of the model per CPU second, shares are of the model."""

    codec: str
    wire_bytes: int
    """Everything stored: payload, index, manifest."""
    payload_bytes: int
    index_bytes: int
    ratio: float
    """Bytes of the model by wire bytes."""
    bits_per_change: float
    encode: Cost
    stage: Cost
    """Verify and decode."""
    commit: Cost
    apply: Cost
    """Stage and commit together."""
    encode_gb_per_s: float
    apply_gb_per_s: float
    encode_over_memcpy: float
    """Speed, as a share of that of a copy of the model in this run."""
    apply_over_memcpy: float
    sender_memory_pct: float
    """Standing and working memory beyond the live weights, at its peak."""
    receiver_memory_pct: float


def memcpy(trajectory: Trajectory, *, repeats: int) -> Cost:
    """A copy of the model into memory that exists already."""
    target = copies(trajectory.old)
    return cost(lambda: overwrite(target, trajectory.new), repeats=repeats)


def manifest_bytes(trajectory: Trajectory) -> int:
    """Size of a manifest with one payload object: all contenders need as much."""
    digest = "0123456789abcdef" * 4
    version = VersionId(1, 128)
    item = PayloadObject(
        rank=0,
        key=delta_key(version, 0, digest[:16]),
        size=trajectory.num_bytes,
        index_offset=trajectory.num_bytes - 10_000,
        index_length=9_000,
        index_sha256=digest,
    )
    manifest = WeightManifest(
        run="6f1e3a52-8d5c-4a7e-9b57-2f2f0c7d1a11",
        epoch=version.epoch,
        number=version.number,
        step=1_128,
        holder="bench-trainer-0",
        base=VersionRef(epoch=1, number=127, manifest_sha256=digest, state=digest[:32]),
        schema_sha256=trajectory.schema.sha256,
        state=digest[:32],
        objects=(item,),
        stats=Stats(
            changed=trajectory.changed,
            elements=trajectory.elements,
            one_ulp=trajectory.changed,
            nonfinite=0,
            codecs={"L1": 500},
            num_bytes=trajectory.num_bytes,
        ),
    )
    return len(manifest.to_bytes())


def measure(contender: Contender, trajectory: Trajectory, copied: Cost, *, repeats: int) -> Row:
    """Send, stage and commit, checked bit for bit.

    Args:
        contender: what is measured.
        trajectory: what it moves.
        copied: memcpy() of the same trajectory.
        repeats: how often each is done; the best counts.

    Raises:
        WrongBitsError: the receiver ended with other weights.
    """
    sent = contender.send(trajectory)
    receiver = contender.receiver(trajectory)
    receiver.commit(receiver.stage(sent))  # compiles what must be compiled
    check(contender.name, receiver.live(), trajectory)
    encode = cost(lambda: contender.send(trajectory), repeats=repeats)
    stage, commit, apply = _receiving(receiver, sent, repeats)
    check(contender.name, receiver.live(), trajectory)
    sender_memory = peak_bytes(lambda: contender.send(trajectory))
    receiver.reset()
    receiver_memory = peak_bytes(lambda: receiver.commit(receiver.stage(sent)))
    size = trajectory.num_bytes
    wire = sent.stored_bytes + manifest_bytes(trajectory)
    return Row(
        codec=contender.name,
        wire_bytes=wire,
        payload_bytes=sent.payload_bytes,
        index_bytes=sent.index_bytes,
        ratio=size / wire,
        bits_per_change=8 * wire / max(1, trajectory.changed),
        encode=encode,
        stage=stage,
        commit=commit,
        apply=apply,
        encode_gb_per_s=size / encode.cpu_s / 1e9,
        apply_gb_per_s=size / apply.cpu_s / 1e9,
        encode_over_memcpy=copied.cpu_s / encode.cpu_s,
        apply_over_memcpy=copied.cpu_s / apply.cpu_s,
        sender_memory_pct=100 * (contender.standing_at_sender + sender_memory / size),
        receiver_memory_pct=100 * (receiver.standing_bytes + receiver_memory) / size,
    )


def _receiving(receiver: Receiver, sent: Sent, repeats: int) -> tuple[Cost, Cost, Cost]:
    """Stage, commit, and both in one go."""
    staged: list[object] = []

    def ready() -> None:
        receiver.reset()
        staged[:] = [receiver.stage(sent)]

    stage = cost(lambda: receiver.stage(sent), before=receiver.reset, repeats=repeats)
    commit = cost(lambda: receiver.commit(staged[0]), before=ready, repeats=repeats)
    staged.clear()
    apply = cost(
        lambda: receiver.commit(receiver.stage(sent)), before=receiver.reset, repeats=repeats
    )
    return stage, commit, apply


def check(name: str, live: tuple[Words, ...], trajectory: Trajectory) -> None:
    """Compare every word with the trainer's.

    Raises:
        WrongBitsError: one differs.
    """
    specs = trajectory.schema.tensors
    for spec, found, wanted in zip(specs, live, trajectory.new, strict=True):
        if not np.array_equal(found, wanted):
            raise WrongBitsError(f"{name}, {trajectory.name}: tensor {spec.name}")

"""Publishers, readers, a keeper and collectors that stop before each of their store calls."""

import functools
import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from typing_extensions import Buffer, override

from etude.common import weights
from etude.common.blobs import MemoryStore, ObjectInfo, Store
from etude.common.errors import CorruptError, EtudeError, StoreError
from etude.common.weights import (
    Edge,
    GarbageCollector,
    Keyframe,
    PayloadObject,
    ReaderLease,
    Retention,
    Skip,
    Stats,
    VersionId,
    VersionRef,
    WeightManifest,
)
from etude.common.weights.protocol import epochs, versions
from etude.common.weights.protocol.manifest import payload_sha16

T = TypeVar("T")
Model = tuple[int, ...]
SCHEMA = hashlib.sha256(b"schema").hexdigest()
RANKS = 2


class Killed(BaseException):
    """SIGKILL, as far as one thread can feel it."""


def state(model: Model) -> str:
    return hashlib.blake2b(repr(model).encode(), digest_size=16).hexdigest()


def payload(old: Model | None, new: Model, rank: int) -> bytes:
    changed = {p: v for p, v in enumerate(new) if p % RANKS == rank and (not old or old[p] != v)}
    return json.dumps(changed).encode() + b" " * (30 if old is None else 0)


def described(rank: int, key: str, data: bytes) -> PayloadObject:
    return PayloadObject(
        rank=rank, key=key, size=len(data), index_offset=0, index_length=1, index_sha256="0" * 64
    )


STATS = Stats(changed=0, elements=4, one_ulp=0, nonfinite=0, codecs={}, num_bytes=0)


@dataclass
class Actor(Store):
    """A thread that stops before each of its store calls."""

    world: "World"
    name: str
    url: str = "memory://"
    busy: bool = False
    alone: bool = False
    """Nobody else may go on meanwhile, so that no thread is needed."""
    fate: str = "ok"
    error: BaseException | None = None
    refusal: EtudeError | None = None
    """What its last job ended with."""
    call: str = ""
    """What it is about to ask of the store, like "put weights/leases/r0.json"."""
    memory: dict[str, Any] = field(default_factory=dict)
    _go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _stopped: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def begin(self, job: Callable[["Actor"], None]) -> None:
        self.busy = True
        threading.Thread(target=self._run, args=(job,), daemon=True).start()
        self._stopped.acquire()
        self._tell()

    def whole(self, job: Callable[["Actor"], None]) -> None:
        """A job from beginning to end."""
        self.alone = True
        self._run(job)
        self.alone = False
        self._tell()

    def step(self, fate: str = "ok") -> None:
        self.fate = fate
        self._go.release()
        self._stopped.acquire()
        self._tell()

    def until(self, call: str | tuple[str, ...], *, past: bool = False) -> None:
        """Go on to right before the next such call, or right behind it.

        Raises:
            LookupError: the job ended without it.
        """
        while self.busy and not self.call.startswith(call):
            self.step()
        if not self.busy:
            raise LookupError(f"{self.name} ended without {call!r}: {self.refusal}")
        if past:
            self.step()

    def finish(self, fate: str = "ok") -> None:
        while self.busy:
            self.step(fate)

    def _run(self, job: Callable[["Actor"], None]) -> None:
        self.refusal = None
        try:
            job(self)
        except Killed:
            self.memory.clear()
        except CorruptError as error:  # nothing is damaged in this world
            self.error = AssertionError(f"{self.name}: {error}")
        except EtudeError as error:  # what it remembers says what it does next
            self.refusal = error
        except BaseException as error:  # noqa: BLE001 - is raised by the machine's thread
            self.error = error
        self.world.held.pop(self.name, None)
        self.busy = False
        if not self.alone:
            self._stopped.release()

    def _tell(self) -> None:
        if self.error is not None:
            raise self.error

    def _call(
        self, call: str, effect: Callable[[], T], half: Callable[[], object] | None = None
    ) -> T:
        if self.alone:
            return effect()
        self.call = call
        self._stopped.release()
        self._go.acquire()
        if self.fate == "killed before":
            raise Killed
        if self.fate == "fails before":
            raise StoreError(f"{self.name}: 503")
        if self.fate.endswith("half-way") and half is not None:
            half()
            raise Killed if self.fate.startswith("killed") else StoreError(f"{self.name}: reset")
        result = effect()
        if self.fate.startswith("killed"):
            raise Killed
        if self.fate.startswith("fails"):
            raise StoreError(f"{self.name}: connection reset")
        return result

    @override
    def get(self, key: str) -> bytes:
        return self._call(f"get {key}", lambda: self.world.raw.get(key))

    @override
    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._call(f"get {key}", lambda: self.world.raw.get_range(key, start, length))

    @override
    def put(self, key: str, data: Buffer) -> None:
        self._call(f"put {key}", lambda: self.world.raw.put(key, data))

    @override
    def create(self, key: str, data: bytes) -> None:
        self._call(f"create {key}", lambda: self.world.create(key, data))

    @override
    def head(self, key: str) -> ObjectInfo | None:
        return self._call(f"head {key}", lambda: self.world.raw.head(key))

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return iter(self._call(f"list {prefix}", lambda: [*self.world.raw.list(prefix, after)]))

    @override
    def delete(self, keys: Sequence[str]) -> None:
        some = keys[: len(keys) // 2]
        delete = self.world.delete
        call = " ".join(["delete", *keys[:1]])
        self._call(call, lambda: delete(keys), half=lambda: delete(some))


@dataclass
class World:
    """The store, and what only the test knows."""

    raw: MemoryStore = field(default_factory=MemoryStore)
    ledger: dict[VersionId, Model] = field(default_factory=dict)
    checkpoints: list[VersionId] = field(default_factory=list)
    """All there ever were; the last two are retained."""
    opened: int = 0
    """Newest epoch whose publisher knows that it has opened it."""
    held: dict[str, list[Edge]] = field(default_factory=dict)
    """Edges that a reader relies on."""
    left_out: set[VersionId] = field(default_factory=set)
    """Versions that a take-over abandoned: nothing is promised of them, even if a later one
    takes them up again."""
    fresh: "itertools.count[int]" = field(default_factory=lambda: itertools.count(10))

    def create(self, key: str, data: bytes) -> None:
        self.raw.create(key, data)
        version = versions.parse_manifest_key(key)
        if version is not None:  # I6: whatever is visible is whole
            for item in weights.read_manifest(self.raw, version).objects:
                assert self.raw.head(item.key) is not None, f"{version} is published without {item}"

    def delete(self, keys: Sequence[str]) -> None:
        self.raw.delete(keys)
        self.check()

    def retained(self) -> list[VersionId]:
        return self.checkpoints[-2:]

    def check(self) -> None:
        """Nobody who needs an accepted version has lost an object of it."""
        chain = weights.accepted_chain(self.raw)
        for name, edge in [(n, edge) for n, edges in self.held.items() for edge in edges]:
            # Asks the epochs alone: a version that was collected under a lease still counts.
            if not REAL_IS_ACCEPTED(self.raw, edge.target.version):
                self.left_out.add(edge.target.version)
            for item in edge.objects if edge.target.version not in self.left_out else ():
                assert self.raw.head(item.key) is not None, f"{name} lost {item.key}"
        numbers = [version.number for version in chain]
        assert numbers == sorted(set(numbers)), f"numbers do not rise along {chain}"
        latest = epochs.latest_epoch(self.raw)
        if latest is None or latest.epoch != self.opened:
            return  # its publisher still may find that it must open another
        usable = [v for v in chain if not weights.is_quarantined(self.raw, v)]
        needed = {*usable[-1:], *set(self.retained()) & set(usable)}
        if latest.parent and not versions.list_published(self.raw, latest.epoch):
            needed.add(latest.parent)
        for version in needed:
            assert weights.is_reachable(self.raw, version), f"nothing leads to {version}"


def open_line(actor: Actor, back: int, after: int | None = None) -> None:
    """A trainer that starts: resumes from a checkpoint that was retained when it looked."""
    world, own = actor.world, actor.memory
    own.clear()
    past = world.checkpoints[-1 - back :]
    parent = past[0] if past else None
    weights.put_schema(actor, b"schema", SCHEMA)
    epoch = weights.claim_epoch(
        actor, holder=actor.name, parent=parent, reason="takeover", after=after
    )
    record = weights.read_epoch(actor, epoch)
    base = None if record.parent is None else weights.read_manifest(actor, record.parent).ref
    model = (0,) * 4 if parent is None else world.ledger[parent]
    own.update(epoch=epoch, next=record.first_number, base=base, model=model)
    if not weights.is_fenced(world.raw, epoch):
        world.opened = epoch
        world.check()


def publish(
    actor: Actor, place: int, value: int, *, saves: bool, manifest_first: bool = False
) -> None:
    """One optimiser step; a trainer that does not learn what became of it starts anew."""
    world, own = actor.world, actor.memory
    mine = dict(own)
    own.clear()
    version = VersionId(mine["epoch"], mine["next"])
    base: VersionRef | None = mine["base"]
    # Small values come again: then a resume repeats what was published before it.
    new = value or next(world.fresh)
    model = tuple(new if p == place else v for p, v in enumerate(mine["model"]))
    old = None if base is None else mine["model"]
    data = [payload(old, model, rank) for rank in range(RANKS)]
    keys = [
        versions.delta_key(version, rank, payload_sha16(part), complete=base is None)
        for rank, part in enumerate(data)
    ]
    manifest = WeightManifest(
        run="r",
        epoch=version.epoch,
        number=version.number,
        step=0,
        holder=actor.name,
        base=base,
        schema_sha256=SCHEMA,
        state=state(model),
        objects=tuple(described(rank, keys[rank], data[rank]) for rank in range(RANKS)),
        stats=STATS,
    )
    world.ledger[version] = model

    def upload() -> None:
        for rank, part in enumerate(data):
            weights.publish_payload(actor, version, rank, part, complete=base is None)

    both: list[Callable[[], object]] = [
        upload,
        functools.partial(weights.publish_manifest, actor, manifest),
    ]
    for work in reversed(both) if manifest_first else both:
        try:
            work()
        except StoreError:
            work()
    own.update(epoch=version.epoch, next=version.number + 1, base=manifest.ref, model=model)
    if saves:
        world.checkpoints.append(version)


def follow(actor: Actor) -> None:
    """A replica: looks for the newest version, and moves to it edge by edge."""
    world, own = actor.world, actor.memory
    lease: ReaderLease = own.setdefault("lease", ReaderLease(actor, actor.name))
    target = weights.newest_version(actor)
    if target is None:
        return
    edges = lease.plan_path(target)
    world.held[actor.name] = edges
    world.check()
    model: Model = own.get("model", ())
    ref = weights.read_manifest(actor, target).ref
    for number, edge in enumerate(edges):
        world.held[actor.name] = edges[number:]
        contents = [json.loads(actor.get(item.key)) for item in edge.objects]
        # I3: what is live is what the edge builds on.
        assert edge.base is None or edge.base.state == state(model)
        values = list((0,) * 4 if edge.base is None else model)
        for place, value in (pair for each in contents for pair in each.items()):
            values[int(place)] = value
        model = tuple(values)
        assert edge.target.state == state(model)
        serve(actor, edge.target, model)
    if not edges:
        serve(actor, ref, model)
    lease.record_live(lease.live or ref)


def serve(actor: Actor, ref: VersionRef, model: Model) -> None:
    world, own = actor.world, actor.memory
    before = REAL_IS_ACCEPTED(world.raw, ref.version)
    if not weights.is_accepted(actor, ref.version):
        raise StoreError(f"{ref.version} is not on the accepted chain")
    # I7: it was on the chain at some moment since the reader asked.
    assert before or REAL_IS_ACCEPTED(world.raw, ref.version), f"{ref.version} is dead"
    # I1: bit for bit.
    assert world.ledger[ref.version] == model
    own["model"] = model
    own["lease"].live = ref


REAL_IS_ACCEPTED = weights.is_accepted


def keep(actor: Actor, picks: tuple[int, int]) -> None:
    """The keeper: a skip or a keyframe of accepted versions."""
    chain = weights.accepted_chain(actor)
    if not chain:
        return
    a, b = sorted(chain[-1 - pick % len(chain)] for pick in picks)
    target = weights.read_manifest(actor, b).ref
    models = actor.world.ledger
    if a == b:
        data = payload(None, models[b], 0), payload(None, models[b], 1)
        keys = [weights.publish_keyframe_part(actor, b, n, part) for n, part in enumerate(data)]
    else:
        data = payload(models[a], models[b], 0), payload(models[a], models[b], 1)
        keys = [weights.publish_skip_part(actor, a, b, n, part) for n, part in enumerate(data)]
    objects = tuple(described(n, keys[n], part) for n, part in enumerate(data))
    common: dict[str, Any] = {
        "run": "r",
        "schema_sha256": SCHEMA,
        "objects": objects,
        "stats": STATS,
    }
    if a == b:
        weights.publish_folded(actor, Keyframe(target=target, **common))
    else:
        base = weights.read_manifest(actor, a).ref
        weights.publish_folded(actor, Skip(base=base, target=target, **common))


def collect(actor: Actor, resumable: Callable[[], list[VersionId]] | None = None) -> None:
    """A collector of the epoch that was open when it began."""
    if actor.world.opened:
        GarbageCollector(
            store=actor,
            epoch=actor.world.opened,
            resumable=resumable or actor.world.retained,
            retention=Retention(versions=1, keyframes=1),
        ).collect()

"""Whatever a run does, every keyframe and every skip in its store is what it says."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.common import weights
from etude.common.blobs import MissingError
from etude.common.weights import VersionId
from etude.common.weights.protocol.listing import take_listing
from etude.common.weights.protocol.plan import Edge
from etude.common.weights.replicas.mirror import Mirror

MakeCompactor = Callable[..., Any]


@pytest.mark.parametrize("seed", range(6))
def test_keyframes_and_skips_of_an_eventful_run_are_right(
    trained: Any, keep: MakeCompactor, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    settings = {
        "every": chance.choice([3, 7]),
        "skips": chance.choice([[2], [2, 4], [4, 8]]),
        "codec": chance.choice(["L1", "L2", "L2r"]),
        "part_bytes": chance.choice([1 << 20, 7_000]),
        "retainVersions": chance.choice([2, 1000]),
        "retainKeyframes": chance.choice([1, 3]),
        "collect_every_s": chance.choice([0.0, 1e9]),
    }
    epoch = number = 1
    trained.publish(1)
    compactor = keep(trained.store, **settings)
    checked = 0
    for _ in range(40):
        match chance.choice(["publish"] * 8 + ["complete", "back", "restart"]):
            case "publish":
                number += 1
                density = chance.choice([0.0, 0.001, 0.01, 0.1, 1.0])
                trained.publish(number, epoch=epoch, density=density)
            case "complete":
                number += 1
                trained.publish(number, epoch=epoch, complete=True)
            case "back":
                recent = weights.accepted_chain(trained.store)[-4:]
                known = [v for v in recent if weights.is_reachable(trained.store, v)]
                parent = chance.choice(known)
                epoch = trained.open(parent, "rollback")
                trained.back_to(parent)
                compactor = keep(trained.store, epoch=epoch, **settings)
            case _:  # it restarts
                compactor = keep(trained.store, epoch=epoch, **settings)
        if chance.random() < 0.7:
            assert compactor.run_round().failures == ()
            checked += check(trained, tmp_path / "reader")
    assert checked


def check(trained: Any, folder: Path) -> int:
    """Compare what every record leads to with the words that were published."""
    store, reader = trained.store, Mirror(trained.store, folder)
    listing = take_listing(store)
    found = 0
    for version, each in listing.keyframes.items():
        if each.record is not None:
            record = weights.read_keyframe(store, version)
            assert trained.is_state(version, record.target.state)
            edge = Edge("keyframe", None, record.target, record.schema_sha256, record.objects)
            reader.apply_edge(edge)
            assert trained.is_in(reader)
            found += 1
    for (base, target), each in listing.skips.items():
        if each.record is None or not _is_there(reader, base):
            continue
        record_of = weights.read_skip(store, base, target)
        assert trained.is_state(target, record_of.target.state)
        edge = Edge(
            *("skip", record_of.base, record_of.target, record_of.schema_sha256),
            record_of.objects,
        )
        reader.apply_edge(edge)
        assert trained.is_in(reader)
        found += 1
    return found


def _is_there(reader: Mirror, version: VersionId) -> bool:
    """Whether the reader could go to a version, which may be collected or abandoned."""
    if version not in weights.accepted_chain(reader.store):
        return False
    try:
        reader.move_to(version)
    except MissingError:
        return False
    return True

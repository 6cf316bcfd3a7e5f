"""The bench of weights, on trajectories so small that every figure but the bits is meaningless."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.common.blobs import Store, open_store
from etude.common.weights.protocol import publication
from etude.common.weights.protocol.manifest import PayloadObject, Stats, VersionRef, WeightManifest
from etude.common.weights.protocol.publication import claim_epoch
from etude.common.weights.protocol.versions import VersionId
from etude.common.weights.tensors import digest
from etude.common.weights.tensors.changes import changed_places
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.common.weights.tensors.tiles import tiling
from etude.trainer.export.delta_packer import Packer, Shard, shard_words

pytestmark = pytest.mark.long
BENCH = Path(__file__).parents[3] / "bench" / "weights.py"
SPEC = TensorSpec(name="w", dtype="BF16", shape=(64, 96), split="rows")
SCHEMA = Schema(grid=8, tensors=(SPEC,))
SHARD = Shard(0, SPEC.elements)
CHANGED = 7


def publish(store: Store, packer: Packer, state: str, base: VersionRef | None) -> VersionRef:
    number = 0 if base is None else base.number + 1
    version = VersionId(1, number)
    made = packer.finish()
    data = made.container.data
    key = publication.publish_payload(store, version, 0, data, complete=base is None)
    item = PayloadObject(
        rank=0,
        key=key,
        size=made.container.size,
        index_offset=made.container.index_offset,
        index_length=made.container.index_length,
        index_sha256=made.container.index_sha256,
    )
    manifest = WeightManifest(
        run="uid",
        epoch=1,
        number=number,
        step=number,
        holder="test",
        base=base,
        schema_sha256=SCHEMA.sha256,
        state=state,
        objects=(item,),
        stats=Stats(**made.stats._asdict()),
    )
    return publication.publish_manifest(store, manifest).ref


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with a complete version and a delta."""
    folder = tmp_path_factory.mktemp("run")
    store = open_store(f"file://{folder}")
    publication.put_schema(store, SCHEMA.to_bytes(), SCHEMA.sha256)
    claim_epoch(store, holder="test", parent=None, reason="start")
    old = np.random.default_rng(0).integers(0, 0x7F00, SPEC.elements).astype(np.uint16)
    new = old.copy()
    new[::1000] += 1
    packer = Packer(SCHEMA)
    packer.add_complete(0, old, SHARD)
    base = publish(store, packer, digest.scan(old, 0).hex(), None)
    packer, flat = Packer(SCHEMA), changed_places(old, new)
    words = shard_words(new, SHARD, tiling(SPEC, SCHEMA.grid))
    packer.add_changes(0, flat, old[flat], new[flat], SHARD, block_words=words)
    publish(store, packer, digest.scan(new, 0).hex(), base)
    return folder


@pytest.fixture(scope="module")
def bench(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bench")
    command = [sys.executable, str(BENCH), "--tiny", "--cache", str(folder / "cache")]
    out = folder / "out" / "weights.json"
    command += ["--run", str(run), "--out", str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table: dict[str, Any] = json.loads(out.read_text())
    return table


def test_every_codec_is_measured_on_every_trajectory(bench: dict[str, Any]) -> None:
    trajectories = bench["trajectories"]
    assert set(trajectories) >= {"A 1e-07", "A 1e-06", "A 3e-06", "B", "B as fp8"}
    codecs = [set(each["codecs"]) for each in trajectories.values()]
    assert codecs == [codecs[0]] * len(codecs)
    assert {"XOR + zstd-1", "int32 index + value", "L1", "L2", "L2r", "dense planes"} <= codecs[0]


def test_no_codec_needs_fewer_bits_than_the_bound(bench: dict[str, Any]) -> None:
    for trajectory in bench["trajectories"].values():
        for row in trajectory["codecs"].values():
            assert row["bits_per_change"] >= trajectory["bound_bits_per_change"]


def test_wire_bytes_are_all_that_is_stored(bench: dict[str, Any]) -> None:
    for trajectory in bench["trajectories"].values():
        manifests = {
            row["wire_bytes"] - row["payload_bytes"] - row["index_bytes"]
            for row in trajectory["codecs"].values()
        }
        assert len(manifests) == 1, "each is charged one manifest, and all the same"
        assert manifests.pop() > 0


def test_the_claimed_ratio_is_the_geometric_mean_of_the_tables(bench: dict[str, Any]) -> None:
    claimed = ["A 1e-07", "A 1e-06", "A 3e-06", "B"]
    tables = [bench["trajectories"][name]["codecs"] for name in claimed]
    ratios = [each["XOR + zstd-1"]["wire_bytes"] / each["L1"]["wire_bytes"] for each in tables]
    assert bench["l1_wire_ratio"] == pytest.approx(math.prod(ratios) ** 0.25)
    assert bench["wire_ratio"] == max(
        bench[name] for name in ("l1_wire_ratio", "l2_wire_ratio", "l2r_wire_ratio")
    )


def test_the_newest_delta_of_a_run_is_read_as_a_replica_would(bench: dict[str, Any]) -> None:
    (found,) = [each for name, each in bench["trajectories"].items() if name.startswith("C run")]
    assert found["facts"]["version"] == "1.1"
    assert found["changed"] == CHANGED

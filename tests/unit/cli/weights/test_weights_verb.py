"""`etude weights` as a user types it."""

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import JsonValue
from safetensors import safe_open
from tests.support import warm_etude
from tests.support.weights.publishing import TrainedPolicy

from etude.common import weights
from etude.common.blobs import Store, open_store
from etude.common.run_folder.state import LocalState, write_state
from etude.common.weights import VersionId
from etude.common.weights.tensors.schema import Schema, TensorSpec

_BITS = {"F32": torch.int32, "BF16": torch.int16}

SCHEMA = Schema(
    grid=1,
    tensors=(
        TensorSpec(name="bias", dtype="F32", shape=(7,), split="rows"),
        TensorSpec(name="up", dtype="BF16", shape=(32, 20), split="rows"),
    ),
)


def etude(*arguments: str) -> subprocess.CompletedProcess[str]:
    return warm_etude.etude("weights", *arguments, env={"COLUMNS": "200"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder: a model, and three versions in its store."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "tiny", "torch_dtype": "x"}')
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_text("other weights")
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.yaml").write_text("kind: RLRun\n")
    model: JsonValue = {"uri": f"file://{tmp_path}/model"}
    write_state(run, LocalState(pid=1, updated_unix_ms=0, run={"spec": {"model": model}}))
    return run


@pytest.fixture
def store(folder: Path) -> Store:
    return open_store(f"file://{folder}")


@pytest.fixture
def policy(store: Store) -> TrainedPolicy:
    made = TrainedPolicy(SCHEMA)
    made.words["bias"][:] = np.arange(7)
    made.words["up"][:] = 0x3F80
    weights.claim_epoch(store, holder="t", parent=None, reason="start")
    made.publish(store, 0, complete=True)
    for number in (1, 2):
        made.step()
        made.publish(store, number)
    return made


def test_a_run_without_versions_says_when_they_come(folder: Path) -> None:
    done = etude("ls", str(folder))
    assert done.returncode == 3
    assert "has published no version yet" in done.stderr


def test_versions_are_listed_for_people_and_for_programs(
    folder: Path, policy: TrainedPolicy
) -> None:
    table = etude("ls", str(folder))
    assert table.returncode == 0, table.stderr
    assert re.findall(r"^1\.\d", table.stdout, re.MULTILINE) == ["1.0", "1.1", "1.2"]
    rows = [json.loads(line) for line in etude("ls", str(folder), "--json").stdout.splitlines()]
    assert [row["kind"] for row in rows] == ["complete", "delta", "delta"]
    assert [row["base"] for row in rows] == [None, "1.0", "1.1"]
    assert rows[-1]["state"] == policy.state().hex()
    assert all(row["standing"] == "accepted" for row in rows)


def test_versions_behind_a_roll_back_are_abandoned(
    folder: Path, store: Store, policy: TrainedPolicy
) -> None:
    weights.claim_epoch(store, holder="t", parent=VersionId(1, 1), reason="rollback")
    rows = [json.loads(line) for line in etude("ls", str(folder), "--json").stdout.splitlines()]
    assert [row["standing"] for row in rows] == ["accepted", "accepted", "abandoned"]


@pytest.mark.usefixtures("policy")
def test_the_objects_of_a_version_are_listed_with_their_sizes(folder: Path, store: Store) -> None:
    done = etude("objects", str(folder), "newest", "--json")
    assert done.returncode == 0, done.stderr
    manifest, payload = map(json.loads, done.stdout.splitlines())
    item = weights.read_manifest(store, VersionId(1, 2)).objects[0]
    assert (manifest["key"], manifest["rank"]) == (VersionId(1, 2).manifest_key, None)
    assert (payload["key"], payload["rank"]) == (item.key, 0)
    for row in (manifest, payload):
        assert row["bytes"] == (folder / row["key"]).stat().st_size
    (folder / item.key).unlink()
    table = etude("objects", str(folder), "1.2")
    assert re.search(r"^rank 0 +missing .* weights/deltas/", table.stdout, re.MULTILINE)
    assert etude("objects", str(folder), "1.9").returncode == 3


@pytest.mark.usefixtures("policy")
def test_a_sound_chain_is_proved(folder: Path) -> None:
    done = etude("verify", str(folder))
    assert done.returncode == 0, done.stderr
    assert "versions 3, ways 3, damaged 0" in done.stdout


def test_versions_whose_beginning_was_collected_are_counted_and_no_damage(
    folder: Path, store: Store, policy: TrainedPolicy
) -> None:
    policy.publish(store, 3, complete=True)
    first = weights.read_manifest(store, VersionId(1, 0))
    store.delete([first.version.manifest_key, *(item.key for item in first.objects)])
    done = etude("verify", str(folder))
    assert done.returncode == 0, done.stderr
    assert "versions 3, ways 1, damaged 0, beginning collected 2" in done.stdout


@pytest.mark.usefixtures("policy")
def test_a_flipped_bit_is_found_and_named(folder: Path, store: Store) -> None:
    key = weights.read_manifest(store, VersionId(1, 1)).objects[0].key
    path = folder / key
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    done = etude("verify", f"file://{folder}")
    assert done.returncode == 1
    assert f"1.1  any: file://{folder}/{key}" in done.stdout.replace("\n", "")
    assert "Traceback" not in done.stderr


def test_two_versions_are_compared_tensor_by_tensor(folder: Path, policy: TrainedPolicy) -> None:
    done = etude("diff", str(folder), "1.0", "newest", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["tensor"]: row for row in map(json.loads, done.stdout.splitlines())}
    first, last = policy.published[VersionId(1, 0)], policy.published[VersionId(1, 2)]
    for name, words in last.items():
        assert rows[name]["changed"] == np.count_nonzero(words != first[name])
    away = np.abs(last["up"].astype(int) - first["up"].astype(int))
    assert rows["up"]["largest"] == away.max()
    assert rows["up"]["one_ulp"] == np.count_nonzero(away == 1)


def test_an_export_is_bit_for_bit_what_was_published(
    folder: Path, tmp_path: Path, policy: TrainedPolicy
) -> None:
    out = tmp_path / "exported"
    done = etude("export", str(folder), "1.1", str(out))
    assert done.returncode == 0, done.stderr
    published = policy.published[VersionId(1, 1)]
    with safe_open(out / "model.safetensors", "pt") as tensors:
        for spec in SCHEMA.tensors:
            tensor = tensors.get_tensor(spec.name)
            words = tensor.contiguous().flatten().view(dtype=_BITS[spec.dtype]).numpy()
            assert tuple(tensor.shape) == spec.shape
            assert words.tobytes() == published[spec.name].tobytes()
    config = json.loads((out / "config.json").read_bytes())
    assert config == {"model_type": "tiny", "dtype": "bfloat16"}
    assert (out / "tokenizer.json").read_text() == "{}"


@pytest.mark.usefixtures("policy")
def test_an_export_does_not_overwrite(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    done = etude("export", str(folder), "newest", str(tmp_path / "full"))
    assert done.returncode == 8
    assert "is not empty" in done.stderr


@pytest.mark.usefixtures("policy")
@pytest.mark.parametrize(("version", "code"), [("1.9", 3), ("one", 2)])
def test_an_unknown_version_is_refused_by_name(
    folder: Path, tmp_path: Path, version: str, code: int
) -> None:
    done = etude("export", str(folder), version, str(tmp_path / "out"))
    assert done.returncode == code
    assert version in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("policy")
def test_a_run_elsewhere_needs_a_model_folder(folder: Path, tmp_path: Path) -> None:
    done = etude("export", f"file://{folder}", "newest", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "--model FOLDER" in done.stderr


@pytest.mark.parametrize("endpoint", ["notaurl", "127.0.0.1:9000", "http://"])
def test_what_is_no_endpoint_is_refused_before_anything_is_asked(endpoint: str) -> None:
    done = etude("ls", "s3://bucket/run", "--endpoint", endpoint)
    assert done.returncode == 4
    assert "give scheme, host and port alone" in done.stderr
    assert "panicked" not in done.stderr

"""What `etude weights` says of stores that are damaged, half gone, or not this user's."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.support.weights.publishing import TrainedPolicy

from etude.cli.main import main
from etude.common import weights
from etude.common.blobs import Store, open_store
from etude.common.weights import VersionId
from etude.common.weights.coding import container
from etude.common.weights.coding.container import ContainerWriter
from etude.common.weights.protocol.manifest import PayloadObject, Stats, WeightManifest
from etude.common.weights.protocol.versions import epoch_key, schema_key
from etude.common.weights.tensors.schema import Schema, TensorSpec

SCHEMA = Schema(grid=1, tensors=(TensorSpec(name="up", dtype="BF16", shape=(8, 9), split="rows"),))
NEWEST = VersionId(1, 3)


class Done(NamedTuple):
    code: int
    out: str
    err: str


Etude = Callable[..., Done]


@pytest.fixture
def etude(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Etude:
    monkeypatch.setenv("COLUMNS", "400")

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["etude", "weights", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Four versions, the first of them complete."""
    (tmp_path / "store").mkdir()
    made = open_store(f"file://{tmp_path}/store")
    weights.claim_epoch(made, holder="t", parent=None, reason="start")
    policy = TrainedPolicy(SCHEMA)
    policy.publish(made, 0, complete=True)
    for number in range(1, NEWEST.number + 1):
        policy.step(0.5)
        policy.publish(made, number)
    return made


def payload(store: Store, version: VersionId) -> str:
    return weights.read_manifest(store, version).objects[0].key


def exported(etude: Etude, store: Store, version: str, tmp_path: Path) -> Done:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    model = ("--model", str(tmp_path / "model"))
    return etude("export", store.url, version, str(tmp_path / "out"), *model)


def test_a_missing_schema_is_named_not_the_version(
    etude: Etude, store: Store, tmp_path: Path
) -> None:
    store.delete([schema_key(SCHEMA.sha256)])
    done = exported(etude, store, "newest", tmp_path)
    assert done.code == 3
    assert f"{store.url}/{schema_key(SCHEMA.sha256)}: missing" in done.err
    assert "is not in the store" not in done.err


def test_a_version_that_is_not_there_is_said_to_be_so(
    etude: Etude, store: Store, tmp_path: Path
) -> None:
    done = exported(etude, store, "1.9", tmp_path)
    assert (done.code, "version 1.9 is not in the store" in done.err) == (3, True)


def test_a_missing_payload_is_called_missing(etude: Etude, store: Store) -> None:
    key = payload(store, NEWEST)
    store.delete([key])
    done = etude("verify", store.url)
    assert done.code == 1
    assert f"1.3  any: {store.url}/{key}: missing" in done.out
    assert "versions 4, ways 4, damaged 1" in done.out


def test_without_its_epochs_record_a_chain_is_damaged_and_was_published(
    etude: Etude, store: Store, tmp_path: Path
) -> None:
    store.delete([epoch_key(1)])
    listed = etude("ls", store.url)
    assert listed.code == 1
    assert f"{store.url}/weights/epochs/000001.json: missing" in listed.out
    assert "abandoned" not in listed.out
    for done in (etude("verify", store.url), exported(etude, store, "newest", tmp_path)):
        assert done.code == 4
        assert "has 4 versions, but no epoch's record" in done.err
        assert "restore weights/epochs/" in done.err


def test_newest_is_the_newest_that_is_sound(etude: Etude, store: Store, tmp_path: Path) -> None:
    weights.quarantine(store, NEWEST, reason="refused")
    done = exported(etude, store, "newest", tmp_path)
    assert done.code == 0, done.err
    assert "newest is 1.2: what came after it is quarantined" in done.err
    assert "version 1.2" in done.err
    proved = etude("verify", store.url)
    assert proved.code == 0
    assert "versions 3, ways 3, damaged 0, quarantined and not read 1" in proved.out
    assert etude("diff", store.url, "1.0", "newest", "--json").code == 0


def test_a_quarantined_version_is_refused_with_the_way_out(
    etude: Etude, store: Store, tmp_path: Path
) -> None:
    weights.quarantine(store, NEWEST, reason="refused")
    done = exported(etude, store, "1.3", tmp_path)
    assert done.code == 1
    assert "version 1.3 is quarantined\n  fix: take another version" in done.err


def test_where_all_is_quarantined_newest_says_so(
    etude: Etude, store: Store, tmp_path: Path
) -> None:
    for number in range(4):
        weights.quarantine(store, VersionId(1, number), reason="refused")
    done = exported(etude, store, "newest", tmp_path)
    assert (done.code, "every version is quarantined" in done.err) == (4, True)


def test_damage_is_told_with_the_way_out(etude: Etude, store: Store, tmp_path: Path) -> None:
    key = payload(store, NEWEST)
    data = bytearray(store.get(key))
    data[3] ^= 1
    store.put(key, bytes(data))
    done = exported(etude, store, "newest", tmp_path)
    assert done.code == 1
    assert "fix: restore what is named" in done.err
    assert "[Corrupt]" in done.err


def test_a_stray_file_among_the_records_is_passed_over_and_named(
    etude: Etude, store: Store
) -> None:
    store.put("weights/epochs/000001.json~", b"{")
    done = etude("ls", store.url)
    assert done.code == 0
    assert "weights/epochs/000001.json~: no epoch's record has this name" in done.err
    assert "versions 4, ways 4, damaged 0" in etude("verify", store.url).out


def test_versions_of_two_models_are_not_compared(etude: Etude, store: Store) -> None:
    other = Schema(
        grid=1, tensors=(TensorSpec(name="up", dtype="BF16", shape=(8, 7), split="rows"),)
    )
    TrainedPolicy(other).publish(store, 4, complete=True)
    done = etude("diff", store.url, "1.3", "1.4")
    assert done.code == 4
    assert done.err.startswith("version 1.3 and version 1.4  tensor 'up' was BF16[8, 9]")


def test_a_schema_larger_than_any_model_is_damage_of_its_version(
    etude: Etude, store: Store
) -> None:
    huge = TensorSpec(name="up", dtype="BF16", shape=((1 << 47) - 1,), split="rows")
    publish_empty(store, VersionId(1, 4), Schema(grid=2, tensors=(huge,)))
    done = etude("verify", store.url)
    assert done.code == 1
    assert f"1.4  any: version 1.4 of {store.url}: schema" in done.out
    assert "says 281474976710656 bytes" in done.out
    assert "versions 5, ways 5, damaged 1" in done.out


def test_a_model_larger_than_the_disk_is_told_before_a_word_is_written(
    etude: Etude, store: Store
) -> None:
    large = TensorSpec(name="up", dtype="BF16", shape=((1 << 43) - 99,), split="rows")
    publish_empty(store, VersionId(1, 4), Schema(grid=2, tensors=(large,)))
    done = etude("verify", store.url)
    assert done.code == 1
    assert f"version 1.4 of {store.url} takes 17592186044224 bytes" in done.err
    assert "fix: free some space" in done.err


def publish_empty(store: Store, version: VersionId, schema: Schema) -> None:
    """A complete version whose payload has no block."""
    weights.put_schema(store, schema.to_bytes(), schema.sha256)
    made = ContainerWriter(kind=container.COMPLETE).finish()
    key = weights.publish_payload(store, version, 0, made.data, complete=True)
    item = PayloadObject(
        rank=0,
        key=key,
        size=made.size,
        index_offset=made.index_offset,
        index_length=made.index_length,
        index_sha256=made.index_sha256,
    )
    nothing = Stats(changed=0, elements=0, one_ulp=0, nonfinite=0, codecs={}, num_bytes=1)
    manifest = WeightManifest(
        run="r",
        epoch=version.epoch,
        number=version.number,
        step=0,
        holder="t",
        base=None,
        schema_sha256=schema.sha256,
        state="0" * 32,
        objects=(item,),
        stats=nothing,
    )
    store.create(version.manifest_key, manifest.to_bytes())


def test_a_scratch_folder_that_is_not_there_is_named(etude: Etude, store: Store) -> None:
    done = etude("verify", store.url, "--scratch", "/nowhere/at/all")
    assert done.code == 1
    assert done.err.startswith("/nowhere/at/all/")
    assert "fix: name a folder that is there" in done.err


def without_privilege(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As a user whom permissions bind, which root is not."""
    bound = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    command = [sys.executable, "-c", "from etude.cli.main import main; main()", *arguments]
    return subprocess.run(
        [*(bound if os.geteuid() == 0 else []), *command],
        capture_output=True,
        text=True,
        check=False,
        env={"COLUMNS": "400", "PATH": os.environ["PATH"]},
        timeout=120,
    )


needs_setpriv = pytest.mark.skipif(
    os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root, and no setpriv"
)


@needs_setpriv
def test_one_unreadable_manifest_leaves_the_others_listed(store: Store, tmp_path: Path) -> None:
    (tmp_path / "store" / VersionId(1, 1).manifest_key).chmod(0)
    done = without_privilege("weights", "ls", store.url, "--json")
    assert done.returncode == 1
    rows = [json.loads(row) for row in done.stdout.splitlines()]
    standings = ["accepted", "unreadable", "accepted", "accepted"]
    assert [row["standing"] for row in rows] == standings
    assert "Permission denied" in rows[1]["problem"]


@needs_setpriv
def test_one_unreadable_payload_leaves_the_others_proved(store: Store, tmp_path: Path) -> None:
    (tmp_path / "store" / payload(store, NEWEST)).chmod(0)
    done = without_privilege("weights", "verify", store.url)
    assert done.returncode == 1
    assert "versions 4, ways 4, damaged 1" in done.stdout


@needs_setpriv
def test_a_folder_that_may_not_be_used_is_no_matter_of_endpoints(
    store: Store, tmp_path: Path
) -> None:
    (tmp_path / "store").chmod(0o555)
    done = without_privilege("storage", "check", store.url)
    (tmp_path / "store" / "weights" / "epochs").chmod(0)
    listed = without_privilege("weights", "ls", store.url)
    for path in (tmp_path / "store", tmp_path / "store" / "weights" / "epochs"):
        path.chmod(0o755)
    assert (done.returncode, listed.returncode) == (1, 1)
    for words in (done.stdout, listed.stderr):
        assert "let this user read, write and delete" in words
        assert "endpoint" not in words

"""Inputs are read from where they are: a folder as it stands, a prefix as a fresh copy."""

import json
from pathlib import Path

import pytest
from tests.support.kube.later_release import with_strangers

from etude.common import stores
from etude.common.api.storage import StoreAccess
from etude.common.blobs import MemoryStore
from etude.common.errors import CorruptError, UserError
from etude.common.role_inputs import ResolvedPool, ResolvedRun, read_pool, read_run
from etude.common.stores import local_folder, open_source

URI = "s3://bucket/tasks/a-task"
ACCESS = StoreAccess()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    store = MemoryStore(objects={"task.toml": b"one", "tests/test.sh": b"sh"})
    monkeypatch.setattr(stores, "open_run_store", lambda uri, access: store)
    return store


def content(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_prefix_becomes_a_folder_of_its_last_name(store: MemoryStore, tmp_path: Path) -> None:
    folder = local_folder(URI, tmp_path, ACCESS)
    assert folder.name == "a-task"
    assert content(folder) == store.objects
    assert [path.name for path in folder.parent.iterdir()] == ["a-task"]


def test_the_empty_object_that_stands_for_a_folder_is_no_file(
    store: MemoryStore, tmp_path: Path
) -> None:
    store.put("tests", b"")
    folder = local_folder(URI, tmp_path, ACCESS)
    assert content(folder).keys() == {"task.toml", "tests/test.sh"}


def test_a_download_is_used_again_while_the_prefix_is_the_same(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = local_folder(URI, tmp_path, ACCESS)
    monkeypatch.delattr(MemoryStore, "get")
    assert local_folder(URI, tmp_path, ACCESS) == folder


def test_a_correction_of_equal_length_and_a_deletion_arrive(
    store: MemoryStore, tmp_path: Path
) -> None:
    local_folder(URI, tmp_path, ACCESS)
    store.put("task.toml", b"two")
    store.delete(["tests/test.sh"])
    assert content(local_folder(URI, tmp_path, ACCESS)) == {"task.toml": b"two"}


def test_a_download_that_broke_off_is_no_download(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(MemoryStore, "get", lambda self, key: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            local_folder(URI, tmp_path, ACCESS)
    assert content(local_folder(URI, tmp_path, ACCESS)) == store.objects


def test_a_large_object_is_read_in_ranges(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "RANGE_BYTES", 3)
    store.objects |= {f"weights-{size}": bytes(range(size)) for size in (3, 4, 6, 7)}
    lengths: list[int] = []
    get_range = MemoryStore.get_range

    def get_recorded(self: MemoryStore, key: str, start: int, length: int) -> bytes:
        lengths.append(length)
        return get_range(self, key, start, length)

    monkeypatch.setattr(MemoryStore, "get_range", get_recorded)
    assert content(local_folder(URI, tmp_path, ACCESS)) == store.objects
    assert lengths == [3, 1, 3, 3, 3, 3, 1]


def test_a_key_that_leaves_the_folder_is_refused(store: MemoryStore, tmp_path: Path) -> None:
    store.objects["../outside"] = b"x"  # no store of ours would take it
    with pytest.raises(CorruptError, match="leaves the prefix"):
        local_folder(URI, tmp_path, ACCESS)


def test_an_empty_prefix_is_refused(store: MemoryStore, tmp_path: Path) -> None:
    store.objects.clear()
    with pytest.raises(UserError, match="holds no files"):
        local_folder(URI, tmp_path, ACCESS)


def test_a_source_that_is_missing_is_refused_and_not_made(tmp_path: Path) -> None:
    missing = tmp_path / "mistyped" / "tasks"
    with pytest.raises(UserError, match="holds no files"):
        open_source(missing.as_uri(), ACCESS)
    with pytest.raises(UserError, match="holds no files"):
        local_folder(missing.as_uri(), tmp_path, ACCESS)
    assert not missing.parent.exists()


def test_a_source_that_is_there_is_read_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1")
    assert local_folder(tmp_path.as_uri(), tmp_path / "scratch", ACCESS) == tmp_path
    assert open_source(tmp_path.as_uri(), ACCESS).get("x") == b"1"


RUN = {
    "model": {"uri": "s3://inputs/model"},
    "storage": {"uri": "s3://runs/demo"},
    "phases": [
        {
            "name": "sft",
            "type": "SupervisedFineTuning",
            "maxSteps": 1,
            "optimizer": {"learningRate": "1e-3"},
            "data": [{"name": "traces", "uri": "s3://inputs/traces.jsonl"}],
        }
    ],
    "roles": {"trainer": {"podTemplate": {"spec": {"containers": [{"name": "trainer"}]}}}},
}


def test_what_an_operator_of_a_later_release_wrote_for_its_roles_is_read(tmp_path: Path) -> None:
    run = ResolvedRun.model_validate({"name": "demo", "uid": "u", "spec": RUN})
    pool = ResolvedPool.model_validate(
        {"name": "repos", "uid": "u", "spec": {"templates": [{"name": "python"}]}}
    )
    path = tmp_path / "given.json"
    path.write_text(json.dumps(with_strangers(run)))
    assert read_run(path) == run
    path.write_text(json.dumps(with_strangers(pool)))
    assert read_pool(path) == pool


def test_a_file_that_says_too_little_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"name": "demo", "uid": "u", "spec": {}}))
    with pytest.raises(UserError, match=r"spec\.model"):
        read_run(path)

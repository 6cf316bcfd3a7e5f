"""Tasks in an object store: read without leaving copies, also those whose files are in an image."""

from pathlib import Path

import pytest

from etude.common import stores
from etude.common.api.storage import StoreAccess
from etude.common.blobs import open_store
from etude.common.errors import UserError
from etude.common.harbor import task as harbor_task
from etude.envserver.host.task_images import TaskTemplate
from etude.envserver.host.workspace_sources import WorkspaceSources
from etude.envserver.storage.store_reads import DirectReads

IMAGE = f"docker.io/acme/words@sha256:{'0' * 64}"
FILES = {
    "instruction.md": b"Count the words.\n",
    "tests/test.sh": b"echo 1 > /logs/verifier/reward.txt\n",
}


def upload(endpoint: str, name: str, files: dict[str, bytes]) -> str:
    uri = f"s3://etude/{name}"
    store = open_store(uri, endpoint=endpoint)
    for path, data in files.items():
        store.put(path, data)
    return uri


@pytest.mark.usefixtures("s3_credentials")
async def test_a_workspace_in_a_bucket_leaves_no_copy_on_the_host(
    tmp_path: Path, moto_endpoint: str
) -> None:
    uri = upload(moto_endpoint, "copies/environment", {"a/b.py": b"x = 1\n"})
    access = StoreAccess(endpoint=moto_endpoint)
    sources = WorkspaceSources(tmp_path / "scratch", DirectReads(access))
    found = await sources.get(uri)
    assert {path: file.content for path, file in found.tree.items()} == {"a/b.py": b"x = 1\n"}
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.usefixtures("s3_credentials")
async def test_a_task_whose_files_are_in_its_image_needs_no_folder_that_a_bucket_cannot_hold(
    tmp_path: Path, moto_endpoint: str
) -> None:
    settings = f'[metadata]\netude_image = "{IMAGE}"\n'.encode()
    uri = upload(moto_endpoint, "words", FILES | {"task.toml": settings})
    access = StoreAccess(endpoint=moto_endpoint)
    with stores.temporary_folder(uri, tmp_path, access) as folder:
        task = harbor_task.read_task(folder)
        assert harbor_task.read_files(task.environment) == {}
    sources = WorkspaceSources(tmp_path / "scratch", DirectReads(access))
    template = TaskTemplate("python@sha256:0", IMAGE, None, None)
    assert (await sources.get(f"{uri}/environment", template)).tree == {}
    with pytest.raises(UserError, match="holds no files"):
        await sources.get(f"{uri}/environment")


@pytest.mark.usefixtures("s3_credentials")
def test_a_task_without_an_image_by_digest_still_needs_its_environment(
    tmp_path: Path, moto_endpoint: str
) -> None:
    uri = upload(moto_endpoint, "bare", FILES | {"task.toml": b""})
    access = StoreAccess(endpoint=moto_endpoint)
    with (
        stores.temporary_folder(uri, tmp_path, access) as folder,
        pytest.raises(UserError, match="environment  is missing"),
    ):
        harbor_task.read_task(folder)

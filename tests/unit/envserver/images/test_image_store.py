"""Images through a store: whoever knows the name gets exactly that image, or an error."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.common.blobs import MemoryStore
from etude.common.errors import CorruptError
from etude.envserver.images import built_image, image_store
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.built_image import FILES, MANIFEST, BuiltImage


@pytest.fixture
def image(tmp_path: Path) -> BuiltImage:
    folder = tmp_path / "here" / "images" / "address"
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_bytes(name.encode() * 1000)
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}
    (folder / MANIFEST).write_text(json.dumps({"name": "python", "files": digests}))
    return built_image.read_image(folder)


@pytest.fixture
def there(tmp_path: Path) -> BuildCache:
    """Another machine's images."""
    return BuildCache(tmp_path / "there")


def quiet(text: str) -> None:
    del text


def test_an_image_arrives_as_it_was_and_is_fetched_once(
    image: BuiltImage, there: BuildCache
) -> None:
    store = MemoryStore()
    name = image_store.push_image(image, store, quiet)
    found = image_store.fetch_image(name, store, there)
    assert (found.name, found.files) == (image.name, image.files)
    for file in (*FILES, MANIFEST):
        assert (found.folder / file).read_bytes() == (image.folder / file).read_bytes()
    assert image_store.fetch_image(name, MemoryStore(), there) == found


def test_what_is_there_is_not_sent_again(image: BuiltImage) -> None:
    store, said = MemoryStore(), list[str]()
    first = image_store.push_image(image, store, said.append)
    assert len(said) == len(FILES)
    assert image_store.push_image(image, store, said.append) == first
    assert len(said) == len(FILES)


def damaged(store: MemoryStore, name: str) -> None:
    store.put(f"{name}/root.sqsh", b"other" * 1000)


def cut_off(store: MemoryStore, name: str) -> None:
    store.delete([f"{name}/vmlinuz"])


def without_manifest(store: MemoryStore, name: str) -> None:
    store.delete([f"{name}/{MANIFEST}"])


def another(store: MemoryStore, name: str) -> None:
    store.put(f"{name}/{MANIFEST}", store.get(f"{name}/{MANIFEST}").replace(b"python", b"pithon"))


@pytest.mark.parametrize("spoil", [damaged, cut_off, without_manifest, another])
def test_a_store_with_something_else_is_found_out_and_nothing_is_kept(
    image: BuiltImage, there: BuildCache, spoil: Callable[[MemoryStore, str], None]
) -> None:
    store = MemoryStore()
    name = image_store.push_image(image, store, quiet)
    spoil(store, name)
    with pytest.raises(CorruptError):
        image_store.fetch_image(name, store, there)
    assert there.entries(image_store.KIND) == []


@pytest.mark.parametrize(
    "files", [{}, [], {"../../etc/passwd": "0" * 64, **dict.fromkeys(FILES, "0")}, {"vmlinuz": ""}]
)
def test_a_manifest_names_the_files_of_an_image_and_no_others(
    there: BuildCache, files: dict[str, str]
) -> None:
    store = MemoryStore()
    data = json.dumps({"name": "python", "files": files}).encode()
    name = hashlib.sha256(data).hexdigest()[:32]
    store.put(f"{name}/{MANIFEST}", data)
    with pytest.raises(CorruptError, match="not a manifest of an image"):
        image_store.fetch_image(name, store, there)

"""Images that go: never one that a pool names, and never one that a node boots."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from etude.common.blobs import MemoryStore
from etude.common.errors import UserError
from etude.envserver.images import built_image, image_references, image_store, removal
from etude.envserver.images.build_cache import BuildCache, hold
from etude.envserver.images.built_image import FILES, MANIFEST, BuiltImage
from etude.envserver.images.command import main
from etude.envserver.images.removal import KINDS, StoredImage


@pytest.fixture
def cache(tmp_path: Path) -> BuildCache:
    return BuildCache(tmp_path / "cache")


def made(
    cache: BuildCache, name: str, address: str, *, kind: str = "images", built_s: int = 0
) -> BuiltImage:
    def fill(folder: Path) -> None:
        for file in FILES:
            (folder / file).write_bytes(f"{address} {file}".encode())
        files = dict.fromkeys(FILES, "digest")
        (folder / MANIFEST).write_text(json.dumps({"name": name, "files": files}))

    folder = cache.entry(kind, address, fill)
    os.utime(folder, (built_s, built_s))
    return built_image.read_image(folder)


def manifests(path: Path, *images: str) -> Path:
    templates = [{"name": f"t{n}", "image": image} for n, image in enumerate(images)]
    pool = {"kind": "EnvPool", "spec": {"templates": templates}}
    items = [pool, {"kind": "EnvPool", "spec": {"templates": [{"name": "bare"}]}}]
    path.write_text(json.dumps({"kind": "List", "items": items}))
    return path


def addresses(cache: BuildCache) -> set[str]:
    return {each.address for each in removal.list_cached(cache)}


def test_what_pools_and_runs_name_is_found_wherever_it_stands(tmp_path: Path) -> None:
    run = {
        "kind": "RLRun",
        "spec": {
            "roles": {
                "environments": [
                    {"name": "e", "poolTemplate": {"templates": [{"name": "t", "image": "mine"}]}}
                ]
            }
        },
    }
    of_run = tmp_path / "run.yaml"
    of_run.write_text(json.dumps(run))
    of_pools = manifests(tmp_path / "pools.yaml", "s3://b/images/" + 32 * "a", "python")
    found = image_references.named_images([of_run, of_pools])
    assert found == {"mine", "python", "s3://b/images/" + 32 * "a"}


def test_a_file_that_cannot_be_read_removes_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [")
    for name, reason in (("none.yaml", "NotFound"), ("bad.yaml", "InvalidYaml")):
        with pytest.raises(UserError, match=name) as refused:
            image_references.named_images([tmp_path / name])
        assert refused.value.problem.reason == reason
        assert "Errno" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    ["", "---\n", '{"kind": "List", "items": []}', '{"kind": "Pod", "spec": {"image": "EnvPool"}}'],
)
def test_a_file_without_pools_removes_nothing(tmp_path: Path, text: str) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text(text)
    with pytest.raises(UserError, match=r"empty\.yaml"):
        image_references.named_images([empty])
    pools = manifests(tmp_path / "pools.yaml", "mine")
    assert image_references.named_images([empty, pools]) == {"mine"}
    assert image_references.named_images([]) == frozenset()


KEPT = st.builds(
    StoredImage,
    kind=st.sampled_from(KINDS),
    name=st.sampled_from(["a", "b"]),
    address=st.sampled_from(["1", "2", "3"]),
    num_bytes=st.just(1),
    changed_s=st.sampled_from([1.0, 9.0]),
    is_newest=st.booleans(),
)
NAMES = st.sets(st.sampled_from(["a", "b", "s3://x/y/1", "file:///i/2"]))


@given(st.lists(KEPT), NAMES)
def test_pruning_keeps_what_is_named_newest_or_young(
    kept: list[StoredImage], named: set[str]
) -> None:
    going = removal.prunable(kept, named, before_s=5.0)
    for each in kept:
        stays = each.is_newest or each.changed_s > 5.0 or each.is_named(named)
        assert (each in going) is not stays


def test_pruning_takes_older_images_of_a_name_and_leaves_the_newest(cache: BuildCache) -> None:
    for place, address in enumerate(("old", "named", "new")):
        made(cache, "python", address, built_s=place)
    made(cache, "other", "fetched", kind="fetched")
    named = frozenset({"file:///somewhere/named"})
    going = removal.prunable(removal.list_cached(cache), named, before_s=100.0)
    assert [(each.address, is_gone) for each, is_gone in removal.remove_cached(cache, going)] == [
        ("old", True),
        ("fetched", True),
    ]
    assert addresses(cache) == {"named", "new"}


class BusyCache(BuildCache):
    """A cache in which others build or remove right after each listing."""

    def __init__(self, root: Path, meanwhile: Callable[[BuildCache], object]) -> None:
        super().__init__(root)
        self.meanwhile = meanwhile

    @override
    def entries(self, kind: str) -> list[Path]:
        found = super().entries(kind)
        self.meanwhile(BuildCache(self.root))
        return found


def test_what_is_built_or_removed_between_two_looks_disturbs_no_listing(cache: BuildCache) -> None:
    made(cache, "python", "one")
    made(cache, "rust", "two")
    builds = BusyCache(cache.root, lambda it: made(it, "new", "three"))
    assert [each.address for each in removal.list_cached(builds)] == ["one", "two"]
    removes = BusyCache(cache.root, lambda it: it.remove("images", "two"))
    assert [each.address for each in removal.list_cached(removes)] == ["one", "three"]
    assert addresses(cache) == {"one", "three"}


def test_an_image_that_goes_before_it_is_measured_is_none(cache: BuildCache) -> None:
    image = made(cache, "python", "one")
    assert cache.remove("images", "one")
    assert list(removal._present_images([image], "images")) == []


def test_an_image_that_a_host_boots_stays_until_the_host_has_ended(cache: BuildCache) -> None:
    image = made(cache, "python", "one")
    descriptor = hold(image.folder)
    assert descriptor is not None
    assert not cache.remove("images", "one")
    assert image.root.exists()
    os.close(descriptor)
    assert cache.remove("images", "one")
    assert not image.folder.exists()
    assert cache.remove("images", "one")
    assert hold(image.folder) is None


def test_a_store_loses_whole_images_and_what_was_cut_off(
    cache: BuildCache, capsys: pytest.CaptureFixture[str]
) -> None:
    store = MemoryStore()
    first, second = (
        image_store.push_image(made(cache, name, name), store, lambda _: None)
        for name in ("a", "b")
    )
    store.put(f"{32 * 'c'}/root.sqsh", b"cut off")
    store.put("notes/of/somebody.txt", b"else's")
    going = removal.prunable(removal.list_stored(store), {f"s3://x/{second}"}, before_s=2e10)
    assert {each.address for each in going} == {first, 32 * "c"}
    assert all(is_gone for _, is_gone in removal.remove_stored(store, going))
    assert {key.key.partition("/")[0] for key in store.list("")} == {second, "notes"}


def ran(cache: BuildCache, *words: str) -> int:
    return main([*words, "--cache", str(cache.root)])


def test_rm_says_what_it_does_and_a_dry_run_does_nothing(
    cache: BuildCache, capsys: pytest.CaptureFixture[str]
) -> None:
    made(cache, "python", "one")
    assert ran(cache, "rm", "python", "--dry-run") == 0
    assert "would remove python" in capsys.readouterr().out
    assert addresses(cache) == {"one"}
    assert ran(cache, "rm", "python") == 0
    assert "removed python" in capsys.readouterr().out
    assert addresses(cache) == set()
    assert ran(cache, "rm", "python") == 3


def test_rm_refuses_what_a_pool_names_or_a_host_boots(
    cache: BuildCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = made(cache, "python", "one")
    pools = manifests(tmp_path / "pools.yaml", "python")
    assert ran(cache, "rm", "one", "--pools", str(pools)) == 8
    assert "a template boots one" in capsys.readouterr().err
    descriptor = hold(image.folder)
    assert descriptor is not None
    assert ran(cache, "rm", "one") == 8
    assert "in use, kept" in capsys.readouterr().out
    os.close(descriptor)
    assert addresses(cache) == {"one"}


def test_a_store_is_touched_only_with_word_of_its_pools(
    cache: BuildCache, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (("prune", "s3://runs/images"), ("rm", f"s3://runs/images/{32 * 'a'}")):
        assert ran(cache, *words) == 2
        assert "kubectl get envp,rlr" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "given"),
    [("prune", "file://{}"), ("prune", "{}"), ("rm", "file://{}/" + 32 * "a"), ("prune", "s3://")],
)
def test_only_a_folder_of_a_bucket_is_a_store_to_remove_from(
    cache: BuildCache, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, given: str
) -> None:
    address = tmp_path / "store" / (32 * "a")
    address.mkdir(parents=True)
    (address / MANIFEST).write_text("{}")
    os.utime(address / MANIFEST, (0, 0))
    pools = str(manifests(tmp_path / "pools.yaml", "python"))
    assert ran(cache, verb, given.format(tmp_path / "store"), "--pools", pools) == 2
    said = capsys.readouterr().err
    assert "s3://bucket/prefix" in said
    assert said.startswith("URL " if verb == "prune" else "IMAGE ")
    assert (address / MANIFEST).exists()


def test_who_names_no_image_is_told_where_to_look() -> None:
    for url, fix in ((None, "etude images ls"), ("s3://b/images", "below s3://b/images")):
        with pytest.raises(UserError, match=fix):
            removal.select_removable([], "python", frozenset(), url=url)

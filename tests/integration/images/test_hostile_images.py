"""Images that want to reach the machine that unpacks them: none does."""

import contextlib
import gzip
import hashlib
import json
import os
import shutil
import stat
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.support import needs, oci_layouts
from tests.support.oci_layouts import Member, device, file, folder, link, removed

from etude.common.errors import UserError
from etude.common.pinned_images import PinnedImage
from etude.envserver.images import base_filesystem
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.pull import image_layout, unpacking
from etude.envserver.images.pull.bounded_program import FillLimits
from etude.envserver.images.pull.registry_access import NO_ACCESS
from etude.envserver.images.spec import ImageBase, OciBase
from etude.envserver.storage.store_reads import DirectReads

LIMITS = FillLimits(max_bytes=8 << 20, max_entries=2_000, timeout_s=60, stall_s=60)


@pytest.fixture(autouse=True)
def programs() -> None:
    needs.image_programs()


def unpack(layout: Path, digest: str, scratch: Path, limits: FillLimits = LIMITS) -> Path:
    scratch.mkdir()
    image = PinnedImage(layout.as_uri(), digest)
    fetched = image_layout.fetch_layout(
        image, scratch, registries=NO_ACCESS, reads=DirectReads(), limits=limits
    )
    unpacking.unpack_layout(fetched, scratch / "tree", limits=limits)
    return scratch / "tree"


def unpacked(tmp_path: Path, *layers: Iterable[Member], is_zstd: bool = False) -> Path:
    digest = oci_layouts.write_layout(tmp_path / "oci", *layers, is_zstd=is_zstd)
    return unpack(tmp_path / "oci", digest, tmp_path / "scratch")


@pytest.mark.parametrize("is_zstd", [False, True])
def test_layers_of_an_image_lie_over_each_other(tmp_path: Path, *, is_zstd: bool) -> None:
    below = [folder("etc"), file("etc/a", b"1"), file("etc/b", b"1")]
    above = [file("etc/a", b"2"), removed("etc/b"), link("etc/c", "a")]
    tree = unpacked(tmp_path, below, above, is_zstd=is_zstd)
    assert (tree / "etc/a").read_bytes() == b"2"
    assert not (tree / "etc/b").exists()
    assert (tree / "etc/c").readlink() == Path("a")


@pytest.mark.parametrize(
    "name", ["/evil", "../evil", "../../../evil", "etc/../../evil", "out/evil"]
)
def test_no_path_in_a_layer_leaves_the_root(tmp_path: Path, name: str) -> None:
    host = tmp_path / "host"
    host.mkdir()
    tree = unpacked(tmp_path, [link("out", str(host))], [file(name, b"evil")])
    written = [path for path in tmp_path.rglob("evil") if "blobs" not in path.parts]
    assert written
    assert all(path.is_relative_to(tree) for path in written)
    assert not any(host.iterdir())
    assert not Path("/evil").exists()


@pytest.mark.parametrize("target", ["../secret", "/secret", "out", "a/../../secret", "none"])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_hard_link_reaches_no_file_of_the_host(tmp_path: Path, target: str, layers: int) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    first, second = link("out", str(secret)), link("mine", target, is_hard=True)
    parts = [[first, second]] if layers == 1 else [[first], [second]]
    with contextlib.suppress(UserError):
        # Where the link itself is linked, it leads nowhere before the guest follows it.
        assert (unpacked(tmp_path, *parts) / "mine").is_symlink()
    found = secret.stat()
    assert (found.st_nlink, stat.S_IMODE(found.st_mode)) == (1, 0o600)


def test_devices_sockets_and_rights_to_become_root_are_left_out(tmp_path: Path) -> None:
    pipe = tarfile.TarInfo("run/pipe")
    pipe.type = tarfile.FIFOTYPE
    tree = unpacked(
        tmp_path,
        [device("dev/mem"), (pipe, b""), file("bin/su", mode=0o6755), file("bin/ls", mode=0o755)],
    )
    modes = {name: (tree / "bin" / name).stat().st_mode & 0o7777 for name in ("su", "ls")}
    assert modes == {"su": 0o755, "ls": 0o755}
    assert not list((tree / "dev").iterdir())
    assert not list((tree / "run").iterdir())


def test_a_layer_that_swells_is_stopped_at_the_limit(tmp_path: Path) -> None:
    digest = oci_layouts.write_layout(
        tmp_path / "oci", [file(f"zeros/{n}", bytes(4 << 20)) for n in range(8)]
    )
    layout_bytes = sum(path.stat().st_size for path in (tmp_path / "oci").rglob("*"))
    assert layout_bytes < LIMITS.max_bytes / 8
    with pytest.raises(UserError, match="more than 8 MiB"):
        unpack(tmp_path / "oci", digest, tmp_path / "scratch")


def test_one_file_that_swells_is_stopped_at_the_limit(tmp_path: Path) -> None:
    digest = oci_layouts.write_layout(tmp_path / "oci", [file("zeros", bytes(64 << 20))])
    with pytest.raises(UserError, match=r"unpack"):
        unpack(tmp_path / "oci", digest, tmp_path / "scratch")
    sizes = [path.lstat().st_size for path in (tmp_path / "scratch").rglob("zeros")]
    assert all(size <= LIMITS.max_bytes for size in sizes)


def test_an_image_of_very_many_files_is_stopped_at_the_limit(tmp_path: Path) -> None:
    digest = oci_layouts.write_layout(
        tmp_path / "oci", [file(f"many/{n}", b"") for n in range(4_000)]
    )
    with pytest.raises(UserError, match="more than 2000 files"):
        unpack(tmp_path / "oci", digest, tmp_path / "scratch")


def test_an_image_of_very_deep_folders_is_refused_and_removed(tmp_path: Path) -> None:
    digest = oci_layouts.write_layout(tmp_path / "oci", [file("a/" * 1_500 + "leaf")])
    cache = BuildCache(tmp_path / "cache")
    with cache.scratch() as scratch, pytest.raises(UserError):
        unpack(tmp_path / "oci", digest, scratch / "deep")
    assert not list((cache.root / "partial").iterdir())


@pytest.mark.parametrize("part", ["manifest", "config", "layer"])
def test_a_part_with_another_content_than_its_digest_is_refused(tmp_path: Path, part: str) -> None:
    digest = oci_layouts.write_layout(tmp_path / "oci", [file("a")])
    manifest = json.loads(_blob(tmp_path, digest).read_bytes())
    names = {
        "manifest": digest,
        "config": manifest["config"]["digest"],
        "layer": manifest["layers"][0]["digest"],
    }
    path = _blob(tmp_path, names[part])
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(UserError, match="digest"):
        unpack(tmp_path / "oci", digest, tmp_path / "scratch")


def test_a_layer_with_another_content_than_its_configuration_says_is_refused(
    tmp_path: Path,
) -> None:
    digest = oci_layouts.write_layout(tmp_path / "oci", [file("a")])
    other = oci_layouts.write_layout(tmp_path / "other", [file("evil")])
    manifest = json.loads(_blob(tmp_path, digest).read_bytes())
    lie = json.loads((_blob(tmp_path, other, "other")).read_bytes())["layers"]
    shutil.copytree(tmp_path / "other", tmp_path / "oci", dirs_exist_ok=True)
    lying = oci_layouts.write_manifest(tmp_path / "oci", manifest["config"], lie)
    with pytest.raises(UserError):
        unpack(tmp_path / "oci", lying, tmp_path / "scratch")


@pytest.mark.parametrize("name", ["etc", "tmp", "var"])
def test_a_link_in_an_image_changes_nothing_on_the_host(tmp_path: Path, name: str) -> None:
    host = tmp_path / "host"
    (host / "lib/apt/lists").mkdir(parents=True)
    (host / "hostname").write_text("mine")
    host.chmod(0o700)
    digest = oci_layouts.write_layout(tmp_path / "oci", [link(name, str(host))])
    base = ImageBase(oci=OciBase(layout=str(tmp_path / "oci"), digest=digest))
    with pytest.raises(UserError, match="leads through a link out of the root"):
        base_filesystem.make_base(base, BuildCache(tmp_path / "cache"), lambda text: None)
    assert (host / "lib/apt/lists").is_dir()
    assert (host / "hostname").read_text() == "mine"
    assert stat.S_IMODE(host.stat().st_mode) == 0o700


def test_a_layer_that_claims_to_be_compressed_and_is_not_is_refused(tmp_path: Path) -> None:
    digest = oci_layouts.write_layout(tmp_path / "oci", [file("a")])
    manifest = json.loads(_blob(tmp_path, digest).read_bytes())
    data = gzip.compress(os.urandom(4096))[:-8]
    layer = manifest["layers"][0] | {
        "digest": oci_layouts.add_blob(tmp_path / "oci", data),
        "size": len(data),
    }
    assert layer["digest"] == f"sha256:{hashlib.sha256(data).hexdigest()}"
    broken = oci_layouts.write_manifest(tmp_path / "oci", manifest["config"], [layer])
    with pytest.raises(UserError):
        unpack(tmp_path / "oci", broken, tmp_path / "scratch")


def _blob(tmp_path: Path, digest: str, layout: str = "oci") -> Path:
    return tmp_path / layout / "blobs/sha256" / digest.removeprefix("sha256:")

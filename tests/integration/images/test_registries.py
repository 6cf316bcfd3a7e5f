"""Images of registries, with credentials and mirrors, also when a registry lies or stalls."""

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.support import needs, oci_layouts, registries
from tests.support.oci_layouts import file, folder
from tests.support.registries import Registry

from etude.common.errors import UserError
from etude.common.pinned_images import PinnedImage
from etude.envserver.images.pull import image_layout, unpacking
from etude.envserver.images.pull.bounded_program import FillLimits
from etude.envserver.images.pull.pinning import pin_image
from etude.envserver.images.pull.registry_access import RegistryAccess
from etude.envserver.storage.store_reads import DirectReads

LIMITS = FillLimits(max_bytes=64 << 20, timeout_s=60, stall_s=3)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    needs.image_programs()
    layers = [[folder("app"), file("app/a", b"1")], [file("app/b", b"2")]]
    digest = oci_layouts.write_layout(tmp_path / "oci", *layers)
    with registries.serving(Registry(tmp_path / "oci", tags={"v1": digest})) as made:
        yield made


def access(
    *hosts: Registry, mirrors: Mapping[str, tuple[str, ...]] | None = None, auth: Path | None = None
) -> RegistryAccess:
    insecure = frozenset(each.host for each in hosts)
    return RegistryAccess(credentials=auth, mirrors=mirrors or {}, insecure=insecure)


def pulled(image: PinnedImage, scratch: Path, with_access: RegistryAccess) -> dict[str, bytes]:
    scratch.mkdir()
    layout = image_layout.fetch_layout(
        image, scratch, registries=with_access, reads=DirectReads(), limits=LIMITS
    )
    unpacking.unpack_layout(layout, scratch / "tree", limits=LIMITS)
    return {path.name: path.read_bytes() for path in (scratch / "tree/app").iterdir()}


def layer_of(registry: Registry) -> str:
    manifest = registry.layout / "blobs/sha256" / registry.tags["v1"].removeprefix("sha256:")
    return str(json.loads(manifest.read_bytes())["layers"][0]["digest"])


def test_a_tag_is_pinned_once_and_its_digest_is_pulled(registry: Registry, tmp_path: Path) -> None:
    image = pin_image(f"{registry.host}/acme/shop:v1", access(registry))
    assert image == PinnedImage(f"{registry.host}/acme/shop", registry.tags["v1"])
    registry.asked.clear()
    assert pulled(image, tmp_path / "scratch", access(registry)) == {"a": b"1", "b": b"2"}
    assert not any(path.endswith("/v1") for path in registry.asked)


def test_a_registry_with_credentials_takes_only_the_right_ones(
    registry: Registry, tmp_path: Path
) -> None:
    registry.password = "secret"
    image = PinnedImage(f"{registry.host}/acme/shop", registry.tags["v1"])
    auth = tmp_path / "config.json"

    def write(password: str) -> None:
        word = base64.b64encode(f"etude:{password}".encode()).decode()
        auth.write_text(json.dumps({"auths": {registry.host: {"auth": word}}}))

    for number, given in enumerate((None, "wrong")):
        write(given or "")
        with pytest.raises(UserError) as caught:
            pulled(image, tmp_path / str(number), access(registry, auth=auth if given else None))
        assert "secret" not in str(caught.value)
    write("secret")
    assert pulled(image, tmp_path / "right", access(registry, auth=auth))


@pytest.mark.parametrize("part", ["manifest", "layer"])
def test_a_registry_that_sends_another_content_is_refused(
    registry: Registry, tmp_path: Path, part: str
) -> None:
    digest = registry.tags["v1"] if part == "manifest" else layer_of(registry)
    true = (registry.layout / "blobs/sha256" / digest.removeprefix("sha256:")).read_bytes()
    registry.forged[digest] = true[:-1] + b" "
    image = PinnedImage(f"{registry.host}/acme/shop", registry.tags["v1"])
    with pytest.raises(UserError):
        pulled(image, tmp_path / "scratch", access(registry))


def test_a_registry_that_stalls_is_given_up(registry: Registry, tmp_path: Path) -> None:
    registry.stalls.add(layer_of(registry))
    image = PinnedImage(f"{registry.host}/acme/shop", registry.tags["v1"])
    with pytest.raises(UserError, match="nothing came for 3 s"):
        pulled(image, tmp_path / "scratch", access(registry))


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_layer_without_an_end_is_given_up(
    registry: Registry, tmp_path: Path, *, is_slow: bool
) -> None:
    """Zeros become nothing when skopeo compresses them, so that time is the limit."""
    (registry.drips if is_slow else registry.floods).add(layer_of(registry))
    image = PinnedImage(f"{registry.host}/acme/shop", registry.tags["v1"])
    (tmp_path / "scratch").mkdir()
    with pytest.raises(UserError, match=r"took longer than 4 s|nothing came for 3 s"):
        image_layout.fetch_layout(
            image,
            tmp_path / "scratch",
            registries=access(registry),
            reads=DirectReads(),
            limits=FillLimits(max_bytes=64 << 20, timeout_s=4, stall_s=3),
        )
    size = sum(path.lstat().st_size for path in (tmp_path / "scratch").rglob("*"))
    assert size < 64 << 20


def test_a_registry_that_is_down_is_said_to_be(registry: Registry, tmp_path: Path) -> None:
    image = PinnedImage("127.0.0.1:9/acme/shop", registry.tags["v1"])
    down = RegistryAccess(insecure=frozenset({"127.0.0.1:9"}))
    with pytest.raises(UserError, match="refused"):
        pulled(image, tmp_path / "scratch", down)


def test_an_image_that_a_registry_lacks_is_named(registry: Registry, tmp_path: Path) -> None:
    image = PinnedImage(f"{registry.host}/acme/shop", f"sha256:{'0' * 64}")
    with pytest.raises(UserError, match=f"pull {registry.host}/acme/shop@sha256:0000"):
        pulled(image, tmp_path / "scratch", access(registry))


def test_a_mirror_is_asked_first_and_one_that_lacks_the_image_is_passed_over(
    registry: Registry, tmp_path: Path
) -> None:
    image = PinnedImage(f"{registry.host}/acme/shop", registry.tags["v1"])
    with registries.serving(Registry(registry.layout, tags=registry.tags)) as mirror:
        mirrors: dict[str, tuple[str, ...]] = {registry.host: (mirror.host,)}
        assert pulled(image, tmp_path / "one", access(registry, mirror, mirrors=mirrors))
        assert mirror.asked
        assert not any("/blobs/" in path for path in registry.asked)
        mirror.layout = tmp_path / "nothing"
        assert pulled(image, tmp_path / "two", access(registry, mirror, mirrors=mirrors))

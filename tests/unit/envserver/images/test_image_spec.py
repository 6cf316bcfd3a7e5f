"""Specs of images as people write them."""

import shlex
from pathlib import Path

import pytest

from etude.common.errors import UserError
from etude.envserver.images.builder import _files
from etude.envserver.images.initramfs import SERVICES
from etude.envserver.images.spec import ImageSpec, digest, read_spec

EXAMPLES = sorted((Path(__file__).parents[4] / "examples" / "images").glob("*.yaml"))
SPEC = "name: tiny\nbase: {busybox: {}}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "image.yaml"
    path.write_text(text)
    return path


def test_a_spec_with_a_name_alone_has_the_tools_that_agents_use(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path, "name: plain\n"))
    assert spec.base.debian is not None
    assert spec.base.debian.packages == ("python3", "git", "ripgrep", "ca-certificates")


def test_every_part_of_a_spec_can_be_given(tmp_path: Path) -> None:
    text = """
name: all
base: {debian: {suite: trixie, packages: [g++, libstdc++6]}}
files: [{path: /etc/motd, text: hello, mode: "0600"}]
setup: [{run: make, network: true, timeoutSeconds: 5}]
"""
    spec = read_spec(write(tmp_path, text))
    assert spec.setup[0].timeout_seconds == 5


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("base: {busybox: {}}\n", "name"),
        (SPEC + "colour: red\n", "colour"),
        ("name: x\nbase: {}\n", "base"),
        ("name: x\nbase: {busybox: {}, debian: {}}\n", "base"),
        ("name: x\nbase: {debian: {packages: ['--evil']}}\n", "base.debian.packages.0"),
        ("name: x\nbase: {debian: {mirror: 'file:///etc'}}\n", "base.debian.mirror"),
        ("name: x\nbase: {oci: {layout: image, digest: latest}}\n", "base.oci.digest"),
        (SPEC + "files: [{path: ../etc/passwd, text: ''}]\n", "files.0.path"),
        (SPEC + "files: [{path: /a/../b, text: ''}]\n", "files.0.path"),
        (SPEC + "files: [{path: /a//b, text: ''}]\n", "files.0.path"),
        (SPEC + "files: [{path: /, text: ''}]\n", "files.0.path"),
        (SPEC + "files: [{path: /a, text: '', mode: '0999'}]\n", "files.0.mode"),
        (SPEC + "setup: [{run: ''}]\n", "setup.0.run"),
        (SPEC + "setup: [{run: a, timeoutSeconds: 0}]\n", "setup.0.timeoutSeconds"),
        (SPEC + "disk: {sizeMib: 64}\n", "disk"),
        (SPEC + "kernel: '-o=evil'\n", "kernel"),
        ("[1, 2]\n", "the file"),
        ("", "the file"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, text: str, field: str) -> None:
    with pytest.raises(UserError) as caught:
        read_spec(write(tmp_path, text))
    assert f"{field}: " in caught.value.problem.what


@pytest.mark.parametrize("text", ["{", "a: [", "[" * 5000, "x" * ((1 << 20) + 1)])
def test_what_is_no_spec_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError):
        read_spec(write(tmp_path, text))


def test_a_spec_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_spec(tmp_path / "none.yaml")
    assert caught.value.problem.reason == "NotFound"


def test_the_layout_of_an_oci_image_is_found_beside_the_spec(tmp_path: Path) -> None:
    text = f"name: x\nbase: {{oci: {{layout: image, digest: 'sha256:{'0' * 64}'}}}}\n"
    spec = read_spec(write(tmp_path, text))
    assert spec.base.oci is not None
    assert spec.base.oci.layout == str(tmp_path / "image")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_a_spec(path: Path) -> None:
    assert read_spec(path).name == path.stem


def test_an_address_depends_on_every_part_and_on_their_borders() -> None:
    assert digest("a", "bc") == digest("a", "bc")
    assert len({digest("a", "bc"), digest("ab", "c"), digest("abc"), digest("a", "bd")}) == 4


def test_services_are_begun_in_order_by_a_file_that_only_root_reads() -> None:
    services = [{"start": "it's one"}, {"start": "two\nlines"}]
    given = {"name": "shop", "base": {"busybox": {}}, "services": services}
    spec = ImageSpec.model_validate(given)
    (file,) = _files(spec)
    assert (file.path, file.mode) == (SERVICES, "0700")
    assert shlex.split(file.text, posix=True) == [
        *("/bin/sh", "-e", "-c", "it's one"),
        *("/bin/sh", "-e", "-c", "two\nlines"),
    ]
    assert _files(ImageSpec.model_validate({**given, "services": []})) == []

"""Images that give their tasks away, layer by layer, and layers that are not what they seem."""

import gzip
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.support import oci_layouts
from tests.support.oci_layouts import Member, file, removed

from etude.common.harbor import task as harbor_task
from etude.common.harbor.task import HarborTask
from etude.envserver.tasks import image_audit, layers
from etude.envserver.tasks.layers import DamagedLayerError, LayerLimits

IMAGE = f"docker.io/acme/shop@sha256:{'0' * 64}"
CODE = b"def total(values):\n    return sum(values)\n\n\ndef tax(value):\n    return value * 0.2\n"
FIXED = CODE.replace(b"sum(values)", b"sum(each for each in values if each is not None)")
FILES = {
    "task.toml": f'[metadata]\netude_image = "{IMAGE}"\n'.encode(),
    "instruction.md": b"Fix the total.\n",
    "tests/test.sh": b"pytest /tests/test_total.py; echo 0 > /logs/verifier/reward.txt\n",
    "tests/test_total.py": b"from shop import total\n\n\ndef test_total():\n"
    b"    assert total([1, None, 2]) == 3\n    assert total([None]) == 0\n",
    "solution/solve.sh": b'#!/bin/bash\ncp "$(dirname "$0")/files/shop.py" shop.py\n',
    "solution/files/shop.py": FIXED,
}
BASE = (file("etc/passwd", b"root:x:0:0::/root:/bin/sh\n"), file("app/shop.py", CODE))


@pytest.fixture
def task(tmp_path: Path) -> HarborTask:
    for path, data in FILES.items():
        target = tmp_path / "shop-1" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return harbor_task.read_task(tmp_path / "shop-1")


def make_layout(folder: Path, *members: Iterable[Member]) -> Path:
    """The layout of one image, as it is after it was fetched."""
    layout = folder / "layout"
    digest = oci_layouts.write_layout(layout, *members, config={"WorkingDir": "/app"})
    (layout / "index.json").write_text(f'{{"manifests": [{{"digest": "{digest}"}}]}}')
    return layout


def audited(folder: Path, task: HarborTask, *members: Iterable[Member]) -> list[str]:
    (leaks,) = image_audit.audit_layout(make_layout(folder, *members), [task], folder / "git")
    return [f"{leak.where} {leak.what}" for leak in leaks]


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null"},
    )
    return done.stdout.strip()


def make_repository(folder: Path) -> Path:
    """A repository of one commit, without reflog and remotes."""
    folder.mkdir()
    (folder / "shop.py").write_bytes(CODE)
    git(folder, "init", "-q", "-b", "main")
    commit(folder)
    return folder


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "change")
    shutil.rmtree(folder / ".git/logs")


def members_of(folder: Path) -> list[Member]:
    return [
        file(f"app/{path.relative_to(folder)}", path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]


def test_an_image_with_the_repository_alone_gives_nothing_away(
    tmp_path: Path, task: HarborTask
) -> None:
    repository = make_repository(tmp_path / "work")
    assert audited(tmp_path, task, BASE, members_of(repository)) == []


def test_a_hidden_test_is_named_with_its_layer_though_a_later_one_removes_it(
    tmp_path: Path, task: HarborTask
) -> None:
    test = file("app/tests/test_total.py", FILES["tests/test_total.py"])
    found = audited(tmp_path, task, BASE, [test], [removed("app/tests/test_total.py")])
    whole, lines = found
    assert whole.startswith("layer 2 of 3 (sha256:")
    assert "/app/tests/test_total.py hidden-file: is tests/test_total.py" in whole
    assert "/app/tests/test_total.py tests-lines: has" in lines


def test_lines_of_the_solution_in_another_file_are_found(tmp_path: Path, task: HarborTask) -> None:
    patch = b"".join(b"+" + line + b"\n" for line in FIXED.split(b"\n"))
    (leak,) = audited(tmp_path, task, BASE, [file("root/notes.txt", b"see:\n" + patch)])
    assert "layer 2 of 2" in leak
    assert "/root/notes.txt gold-lines: has 1 of 1 lines of solution/files/shop.py" in leak


def test_a_commit_behind_the_one_that_is_checked_out_is_found(
    tmp_path: Path, task: HarborTask
) -> None:
    repository = make_repository(tmp_path / "work")
    git(repository, "checkout", "-q", "-b", "later")
    (repository / "shop.py").write_bytes(FIXED)
    commit(repository)
    git(repository, "checkout", "-q", "main")
    shutil.rmtree(repository / ".git/logs", ignore_errors=True)
    found = audited(tmp_path, task, BASE, members_of(repository))
    assert [leak for leak in found if "future: has the commit" in leak]
    assert [leak for leak in found if "refs: has refs/heads/later" in leak]
    assert [leak for leak in found if "object" in leak and "hidden-file" in leak]
    assert all("layer 2 of 2" in leak and "/app/.git" in leak for leak in found), found


def test_a_commit_whose_objects_a_later_layer_removes_is_found(
    tmp_path: Path, task: HarborTask
) -> None:
    repository = make_repository(tmp_path / "work")
    before = members_of(repository)
    (repository / "shop.py").write_bytes(FIXED)
    commit(repository)
    gone = {member.name for member, _ in members_of(repository)} - {m.name for m, _ in before}
    cleaned = [*before, *map(removed, sorted(gone))]
    found = audited(tmp_path, task, BASE, members_of(repository), cleaned)
    assert [leak for leak in found if "stray-objects" in leak], found
    assert not [leak for leak in found if " history:" in leak or " refs:" in leak], found


def test_settings_of_a_repository_are_read_and_never_used(tmp_path: Path, task: HarborTask) -> None:
    repository = make_repository(tmp_path / "work")
    marker = tmp_path / "ran"
    settings = f'[core]\n\tfsmonitor = touch {marker}\n[remote "origin"]\n\turl = https://x.org/y\n'
    settings += f"[include]\n\tpath = /etc/shadow\n[core]\n\tsshCommand = touch {marker}\n"
    (repository / ".git/config").write_text(settings)
    (repository / ".git/objects/info").mkdir(exist_ok=True)
    (repository / ".git/objects/info/alternates").write_text("/proc/self/root\n")
    found = audited(tmp_path, task, BASE, members_of(repository))
    assert [leak for leak in found if "remotes: has a remote: https://x.org/y" in leak]
    assert [leak for leak in found if "stray-objects: objects/info/alternates" in leak]
    assert not marker.exists()


def test_every_stream_of_a_packed_layer_is_read(tmp_path: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as made:
        for member, data in (file("a", b"x" * 5_000), file("b", b"y")):
            made.addfile(member, io.BytesIO(data))
    raw = archive.getvalue()
    layout = tmp_path / "layout"
    digest = oci_layouts.add_blob(layout, gzip.compress(raw[:3_000]) + gzip.compress(raw[3_000:]))
    described = {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": digest}
    image = oci_layouts.write_image(layout, [oci_layouts.Layer(described, digest)], {})
    (layout / "index.json").write_text(f'{{"manifests": [{{"digest": "{image}"}}]}}')
    assert [entry.path for entry in layers.read_layers(layout)] == ["a", "b"]


HOSTILE = {
    "a path that climbs": ([file("../../etc/passwd")], "has the path"),
    "too many folders": (
        [oci_layouts.folder(f"{n}") for n in range(20)],
        "holds more than 10 files",
    ),
    "more bytes than allowed": ([file("x", b"x" * 2_000)], "or 1000 bytes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_layer_is_refused_by_its_name(case: str, tmp_path: Path) -> None:
    members, what = HOSTILE[case]
    layout = make_layout(tmp_path, [file("first")], members)
    with pytest.raises(DamagedLayerError, match=what):
        list(layers.read_layers(layout, LayerLimits(max_bytes=1_000, max_entries=10)))


def test_a_header_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    member = tarfile.TarInfo("x")
    member.type, member.size = tarfile.XHDTYPE, 2 << 30
    layout = make_layout(tmp_path, BASE)
    packed = max(layout.glob("blobs/sha256/*"), key=lambda b: b.read_bytes()[:2] == b"\x1f\x8b")
    packed.write_bytes(gzip.compress(member.tobuf() + bytes(10_240)))
    with pytest.raises(DamagedLayerError, match="has a header of 2147483648 bytes"):
        list(layers.read_layers(layout))


def test_a_layer_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    layout = make_layout(tmp_path, BASE)
    digest = max(
        layout.glob("blobs/sha256/*"), key=lambda blob: blob.read_bytes()[:2] == b"\x1f\x8b"
    )
    digest.write_bytes(b"\x1f\x8b\x08 no gzip at all")
    with pytest.raises(DamagedLayerError, match="cannot be read"):
        list(layers.read_layers(layout))


def replace_layer(layout: Path, packed: bytes) -> None:
    """Replace the content of the only layer of a layout."""
    blob = max(layout.glob("blobs/sha256/*"), key=lambda each: each.read_bytes()[:2] == b"\x1f\x8b")
    blob.write_bytes(packed)


def archive_of(path: str, data: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("x" if "\0" in path else path)
        member.size = len(data)
        member.pax_headers = {"path": path} if "\0" in path else {}
        archive.addfile(member, io.BytesIO(data))
    return made.getvalue()


DAMAGES = {
    "the archive ends in a file": gzip.compress(archive_of("app/shop.py", CODE)[:530]),
    "the stream ends in a file": gzip.compress(
        archive_of("app/shop.py", os.urandom(50_000)), compresslevel=0
    )[:20_000],
    "a part of a repository has a long name": gzip.compress(
        archive_of(f"app/.git/refs/{'x' * 300}", b"0" * 40)
    ),
    "a part of a repository has a zero in its name": gzip.compress(
        archive_of("app/.git/refs/a\0b", b"0" * 40)
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_layer_that_cannot_be_read_to_its_end_is_refused(
    case: str, tmp_path: Path, task: HarborTask
) -> None:
    layout = make_layout(tmp_path, BASE)
    replace_layer(layout, DAMAGES[case])
    with pytest.raises(DamagedLayerError, match="cannot be read"):
        image_audit.audit_layout(layout, [task], tmp_path / "git")


def test_a_repository_whose_settings_are_a_folder_is_looked_at(
    tmp_path: Path, task: HarborTask
) -> None:
    repository = make_repository(tmp_path / "work")
    (repository / ".git/config").unlink()
    (repository / ".git/config/refs").mkdir(parents=True)
    (repository / ".git/config/refs/heads").write_text("0" * 40)
    assert audited(tmp_path, task, BASE, members_of(repository)) == []


def test_a_layer_may_have_a_folder_in_place_of_a_file_that_it_removes(
    tmp_path: Path, task: HarborTask
) -> None:
    below = [file("app/.git/refs/heads", b"x")]
    above = [removed("app/.git/refs/heads"), file("app/.git/refs/heads/main", b"y")]
    assert audited(tmp_path, task, BASE, below, above) == []

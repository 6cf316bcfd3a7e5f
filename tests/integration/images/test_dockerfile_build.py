"""A Dockerfile that buildah builds, published and pulled by its digest."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support import needs

from etude.common.errors import UserError
from etude.common.harbor import task as folders
from etude.envserver.images.dockerfile_build import PublishedImage, build_dockerfile
from etude.envserver.images.pull import image_layout, unpacking
from etude.envserver.images.pull.bounded_program import FillLimits
from etude.envserver.images.pull.registry_access import NO_ACCESS
from etude.envserver.storage.store_reads import DirectReads
from etude.envserver.tasks.formats import command

DOCKERFILE = """\
FROM scratch AS tools
COPY busybox /bin/busybox
RUN ["/bin/busybox", "ln", "-s", "busybox", "/bin/sh"]
FROM tools
ENV WORD=two
WORKDIR /app
COPY --chmod=755 src/ .
RUN echo $WORD > b.txt
"""
Build = Callable[[], PublishedImage]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    needs.image_programs()
    if shutil.which("buildah") is None:
        needs.skip("buildah is not installed: `make system-deps` installs it", "qemu")
    (tmp_path / "context/src").mkdir(parents=True)
    shutil.copyfile(shutil.which("busybox") or "", tmp_path / "context/busybox")
    (tmp_path / "context/busybox").chmod(0o755)
    (tmp_path / "context/src/a.txt").write_text("one\n")
    (tmp_path / "context/Dockerfile").write_text(DOCKERFILE)

    def run() -> PublishedImage:
        return build_dockerfile(
            tmp_path / "context",
            (tmp_path / "layouts").as_uri(),
            storage=tmp_path / "storage",
            registries=NO_ACCESS,
            say=lambda text: None,
        )

    return run


def test_what_a_dockerfile_makes_is_pulled_by_the_digest_that_the_build_prints(
    build: Build, tmp_path: Path
) -> None:
    image, folder = build()
    assert folder == "/app"
    assert build().image == image, "the same files make the same digest"
    scratch, limits = tmp_path / "scratch", FillLimits()
    scratch.mkdir()
    layout = image_layout.fetch_layout(
        image, scratch, registries=NO_ACCESS, reads=DirectReads(), limits=limits
    )
    unpacking.unpack_layout(layout, scratch / "tree", limits=limits)
    assert (scratch / "tree/app/a.txt").read_text() == "one\n"
    assert (scratch / "tree/app/b.txt").read_text() == "two\n"
    assert image_layout.image_config(layout)["WorkingDir"] == "/app"


def test_a_step_that_fails_is_shown_and_nothing_is_published(build: Build, tmp_path: Path) -> None:
    (tmp_path / "context/Dockerfile").write_text(DOCKERFILE + "RUN echo it broke; exit 3\n")
    with pytest.raises(UserError, match="it broke"):
        build()
    assert not (tmp_path / "layouts").exists()
    assert str(tmp_path) not in Path("/proc/mounts").read_text(), "buildah left a mount"


@pytest.mark.usefixtures("build")
def test_an_imported_task_names_the_image_that_its_dockerfile_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETUDE_IMAGES", str(tmp_path / "images"))
    task = tmp_path / "words"
    shutil.copytree(tmp_path / "context", task / "environment")
    toml = "artifacts = ['/app/out.txt']\n[verifier]\nenvironment_mode = 'separate'\n"
    files = {"task.toml": toml, "instruction.md": "Count.\n", "tests/test.sh": "true\n"}
    for name, text in files.items():
        (task / name).parent.mkdir(exist_ok=True)
        (task / name).write_text(text)
    assert command.main(["harbor", str(task), "--out", str(tmp_path / "out")]) == 0
    found = folders.read_task(tmp_path / "out/words")
    assert found.image
    assert found.image.startswith((tmp_path / "images/layouts").as_uri() + "@sha256:")
    assert found.artefacts == ("out.txt", "out.txt/**")
    assert not list((tmp_path / "out/words/environment").iterdir())

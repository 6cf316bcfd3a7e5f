"""Importing Harbor tasks whose image has a digest, and so needs no Dockerfile."""

from pathlib import Path

import pytest

from etude.common.harbor import task as folders
from etude.envserver.tasks.formats import command

DIGEST = f"sha256:{'0' * 64}"


def write_task(folder: Path, settings: str) -> None:
    files = {
        "task.toml": settings,
        "instruction.md": "Count the words.\n",
        "environment/Dockerfile": "FROM scratch\nADD https://example.com/x /\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def import_folder(folder: Path, out: Path) -> int:
    return command.main(["harbor", str(folder), "--out", str(out)])


def test_a_task_with_an_image_by_its_digest_names_it_and_has_no_files_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = f"ghcr.io/acme/words@{DIGEST}"
    write_task(tmp_path / "words", f"[environment]\ndocker_image = '{image}'\nworkdir = '/srv'\n")
    assert import_folder(tmp_path / "words", tmp_path / "out") == 0
    assert f"needs image {image}" in capsys.readouterr().err
    assert folders.read_task(tmp_path / "out" / "words").image == image
    assert not list((tmp_path / "out" / "words" / "environment").iterdir())


def test_a_task_with_services_beside_its_image_is_refused_and_not_run_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(tmp_path / "words", f"[environment]\ndocker_image = 'ghcr.io/acme/words@{DIGEST}'\n")
    compose = "services:\n  main: {}\n  db: {image: postgres}\n"
    (tmp_path / "words/environment/docker-compose.yaml").write_text(compose)
    assert import_folder(tmp_path / "words", tmp_path / "out") == 1
    assert "describes services (main, db)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "image", [f"words@{DIGEST}", "ghcr.io/acme/words@sha256:1", f"/x@{DIGEST}"]
)
def test_a_digest_that_is_none_and_a_name_without_a_registry_are_refused(
    image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(tmp_path / "words", f"[environment]\ndocker_image = '{image}'\n")
    assert import_folder(tmp_path / "words", tmp_path / "out") == 1
    assert image in capsys.readouterr().err

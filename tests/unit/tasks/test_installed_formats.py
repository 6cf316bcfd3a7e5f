"""Task formats of installed packages: one file and an entry point, bad sources named."""

from pathlib import Path

import pytest
from tests.support.installed_package import install_package

from etude.common.harbor import task as folders
from etude.envserver.tasks.formats import command

SOURCE = """
import json
from functools import partial

from etude.envserver.storage.trees import File
from etude.envserver.tasks.formats.imported_task import ImportedTask, PendingImport, TaskFormat


def find_tasks(source):
    for kata in json.loads(source.read_text()):
        yield PendingImport(name=kata["name"], take=partial(take, kata))


def take(kata):
    test = f"cd /workspace && python3 -c {kata['check']!r}\\n"
    files = {
        "task.toml": File(b'schema_version = "1.4"\\n'),
        "instruction.md": File(kata["text"].encode()),
        "tests/test.sh": File(test.encode(), executable=True),
    }
    files |= {name: File(b"") for name in kata.get("files", ())}
    return ImportedTask(kata["name"], files, ())


KATAS = TaskFormat(find_tasks=find_tasks)
OTHER = find_tasks
"""
ENTRIES = {
    "etude.task_formats": {"acme.Katas": "acme_katas:KATAS", "acme.Other": "acme_katas:OTHER"}
}
GOOD = '{"name": "add", "text": "Write add.", "check": "import add"}'


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_package(tmp_path, monkeypatch, name="acme_katas", source=SOURCE, entries=ENTRIES)


def take(folder: Path, text: str, name: str = "acme.Katas") -> int:
    source = folder / "katas.json"
    source.write_text(text)
    return command.main(["installed", name, str(source), "--out", str(folder / "out")])


def test_tasks_of_a_format_become_folders(tmp_path: Path) -> None:
    assert take(tmp_path, f"[{GOOD}]") == 0
    task = folders.read_task(tmp_path / "out" / "add")
    assert task.instruction.strip() == "Write add."
    assert list(task.tests()) == ["test.sh"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ('{"name": "no-text"}', "cannot be read by acme.Katas: KeyError: 'check'"),
        (GOOD.replace('"add"', '"../add"', 1), "is '../add', which names no folder"),
        (GOOD[:-1] + ', "files": ["../../evil"]}', "../../evil  is no path inside of the task"),
        (GOOD[:-1] + ', "files": ["/tmp/evil"]}', "/tmp/evil  is no path inside of the task"),
    ],
)
def test_a_bad_row_is_named_and_stops_no_other(
    tmp_path: Path, row: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert take(tmp_path, f"[{row}, {GOOD.replace('add', 'sub')}]") == 1
    assert why in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["sub"]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("acme.Katas", "nothing", "cannot be read by acme.Katas: JSONDecodeError"),
        ("acme.Other", "[]", "is no TaskFormat but a function"),
        ("acme.Absent", "[]", "is not installed"),
    ],
)
def test_a_source_or_a_format_that_cannot_be_read_is_an_error(
    tmp_path: Path, name: str, text: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert take(tmp_path, text, name) == 4
    assert why in capsys.readouterr().err

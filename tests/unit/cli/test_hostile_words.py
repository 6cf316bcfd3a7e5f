"""What comes from a store, a file or a user is printed as it is, and does nothing to a terminal."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from tests.support.weights.publishing import TrainedPolicy

from etude.agent.interactive.user_workspace import Decision, make_edit
from etude.cli.agent.screen import TerminalInput, TextScreen
from etude.cli.output import SafeConsole, escape_controls, say
from etude.common import weights
from etude.common.blobs import open_store
from etude.common.weights import VersionId
from etude.common.weights.tensors.schema import Schema, TensorSpec

HOSTILE = ("b[/evil]", "[red]hidden[/]", "c\x1b]0;title", ":bomb:", "d\x9b31m", "e\u202ereversed")


def etude(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", "from etude.cli.main import main; main()"]
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        check=False,
        env={"COLUMNS": "200", "PYTHONUTF8": "1"},
        timeout=120,
    )


def drawn(thing: object) -> str:
    written = io.StringIO()
    SafeConsole(file=written, width=100).print(thing)
    return written.getvalue()


def table(cell: str | Text) -> Table:
    made = Table(box=None)
    made.add_column(str(cell))
    made.add_row(cell)
    return made


@pytest.mark.parametrize("name", HOSTILE)
def test_every_way_to_print_shows_a_text_and_obeys_none(name: str) -> None:
    for thing in (name, Text(name), table(name), Panel(name, title=Text(name))):
        assert escape_controls(name) in drawn(thing)
    for thing in (name, Text(name), table(name), table(Text(name)), Panel(name, title=Text(name))):
        assert not any(c in drawn(thing) for c in "\x1b\x07\x9b\u202e")


async def test_a_question_shows_the_path_that_a_policy_names_and_obeys_it_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"n\n")
    screen = TextScreen(accepts_edits=False, accepts_commands=False, ask=TerminalInput(reading).ask)
    edit = make_edit("a\x1b[2K\r\nb.txt", None, b"x\n")
    assert await screen.decide_edit(edit) is Decision.REJECTED
    assert capsys.readouterr().err == "edit a␛[2K␍␊b.txt? [y/N] "


def test_a_message_shows_control_characters_instead_of_sending_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say("one\n  two\x1b[2J\r")
    assert capsys.readouterr().err == "one\n  two␛[2J␍\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store at a folder whose name is markup; its tensors' names are worse."""
    made = tmp_path_factory.mktemp("hostile") / "o[/x]"
    made.mkdir(parents=True)
    store = open_store(f"file://{made}")
    weights.claim_epoch(store, holder="t", parent=None, reason="start")
    tensors = tuple(
        TensorSpec(name=name, dtype="F32", shape=(9,), split="rows") for name in sorted(HOSTILE)
    )
    policy = TrainedPolicy(Schema(grid=1, tensors=tensors))
    policy.publish(store, 0, complete=True)
    for name in HOSTILE:
        policy.words[name] += 1
    policy.publish(store, 1)
    return made


def test_tensors_are_compared_under_their_own_names(folder: Path) -> None:
    done = etude("weights", "diff", f"file://{folder}", "1.0", "1.1")
    assert done.returncode == 0, done.stderr
    for name in HOSTILE:
        assert escape_controls(name) in done.stdout.decode()
    assert b"\x1b" not in done.stdout
    rows = etude("weights", "diff", f"file://{folder}", "1.0", "1.1", "--json").stdout
    assert b"\x1b" not in rows
    assert {json.loads(row)["tensor"] for row in rows.splitlines()} == set(HOSTILE)


def test_damage_in_a_folder_with_such_a_name_is_reported(folder: Path) -> None:
    key = weights.read_manifest(open_store(f"file://{folder}"), VersionId(1, 1)).objects[0].key
    sound = (folder / key).read_bytes()
    (folder / key).write_bytes(bytes([*sound[:3], sound[3] ^ 1, *sound[4:]]))
    done = etude("weights", "verify", f"file://{folder}")
    (folder / key).write_bytes(sound)
    assert done.returncode == 1
    assert f"file://{folder}/{key}" in done.stdout.decode().replace("\n", "")
    assert b"Traceback" not in done.stderr


def test_an_export_into_such_a_folder_names_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    out = tmp_path / "p[/y]"
    words = ("newest", os.fspath(out), "--model", os.fspath(tmp_path))
    done = etude("weights", "export", f"file://{folder}", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == f"{out}\n"

"""Every command in the docs exists, and the cheap ones are run as they stand."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from etude.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
CODE = "from etude.cli.main import main; main()"

RUN_AS_THEY_STAND = (
    "etude lint examples/demo/rlrun.yaml",
    "etude doctor",
    "etude tasks generate small --train 4 --held-out 2 --traces 50",
    "etude tasks show small/tasks/train/train-0000",
    "etude tasks verify small/tasks/train",
)
"""Commands that need no cluster and no finished run, in the order in which they work."""


def commands() -> list[tuple[str, str]]:
    """Each line of each shell block, with its page; comments and continuations removed."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                command = line.split("  #")[0].split(" # ")[0].strip()
                if command and not command.startswith("#"):
                    found.append((str(page.relative_to(ROOT)), command))
    return found


def etude_words(command: str) -> list[str] | None:
    words = shlex.split(command)
    return words[1:] if words and words[0] == "etude" else None


@pytest.mark.parametrize(("page", "command"), commands())
def test_a_documented_command_exists_with_its_options(page: str, command: str) -> None:
    words = etude_words(command)
    if words is None:
        target = re.match(r"make ([a-z-]+)", command)
        assert target is None or f"\n{target[1]}:" in (ROOT / "Makefile").read_text()
        return
    verb = get_command(app)
    while words and words[0] in getattr(verb, "commands", {}):
        verb = verb.commands[words.pop(0)]  # type: ignore[attr-defined] # a group has them
    assert not hasattr(verb, "commands"), f"{page}: {command}: no such verb"
    known = {option for parameter in verb.params for option in parameter.opts}
    assert {w.split("=")[0] for w in words if w.startswith("-")} <= known | {"--help"}


def test_the_cheap_commands_work_as_they_stand(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command in RUN_AS_THEY_STAND:
        words = etude_words(command)
        assert words is not None
        done = subprocess.run(
            [sys.executable, "-c", CODE, *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def test_every_link_between_pages_leads_somewhere() -> None:
    dead = [
        f"{page.relative_to(ROOT)} -> {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert dead == []

"""Every command in the docs exists, and the cheap ones are run as they stand."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from pydantic import JsonValue
from tests.support import warm_etude
from tests.support.weights.publishing import TrainedPolicy
from typer.main import get_command

from etude.cli.kubectl import flags
from etude.cli.kubectl import main as plugin
from etude.cli.kubectl.diagnose.advice import ADVICE
from etude.cli.main import app
from etude.common import weights
from etude.common.blobs import open_store
from etude.common.harbor.task_file import MetadataSection
from etude.common.run_folder.state import LocalState, write_state
from etude.common.weights.tensors.schema import Schema, TensorSpec

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

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


def plugin_words(command: str) -> list[str] | None:
    """The words for `kubectl etude` without those of kubectl itself."""
    words = shlex.split(command)
    return list(flags.split_flags(words[2:]).own) if words[:2] == ["kubectl", "etude"] else None


def named() -> list[tuple[str, str]]:
    """Each command that a sentence names, with its page; a group of verbs may stand alone there."""
    found = set()
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        commands = re.findall(r"`((?:kubectl )?etude [^`\n]+)`", prose)
        found |= {(str(page.relative_to(ROOT)), each.rstrip("…")) for each in commands}
    return sorted(found)


def advised() -> list[tuple[str, str]]:
    """Each command that `kubectl etude why` and lint tell people to type."""
    texts = [text for advice in ADVICE.values() for text in advice]
    found = [each for text in texts for each in re.findall(r"kubectl etude [a-z]+[^;,.]*", text)]
    return [("advice.py", each.replace("{run}", "demo")) for each in sorted(set(found))]


@pytest.mark.parametrize(("page", "command"), [*named(), *advised()])
def test_a_command_that_is_named_in_passing_has_a_verb(page: str, command: str) -> None:
    plain = command.removeprefix("kubectl ")
    verb = get_command(plugin.app if plain != command else app)
    words = [word for word in plain.split()[1:] if word.islower() and word.isalpha()]
    assert words[0] in verb.commands, f"{page}: {command}"  # type: ignore[attr-defined] # a group
    while words and words[0] in getattr(verb, "commands", {}):
        verb = verb.commands[words.pop(0)]  # type: ignore[attr-defined] # likewise
    known = {option for parameter in verb.params for option in parameter.opts} | {"--help"}
    known |= {"-n", "--namespace"} if plain != command else set()  # kubectl's own
    given = {word.partition("=")[0] for word in plain.split() if word.startswith("-")}
    assert given <= known, f"{page}: {command}"


@pytest.mark.parametrize(("page", "command"), commands())
def test_a_documented_command_exists_with_its_options(page: str, command: str) -> None:
    words, verb = etude_words(command), get_command(app)
    if words is None:
        words, verb = plugin_words(command), get_command(plugin.app)
    if words is None:
        return  # others: test_makefile.py, tests/cluster/test_documented_commands.py
    while words and words[0] in getattr(verb, "commands", {}):
        verb = verb.commands[words.pop(0)]  # type: ignore[attr-defined] # a group has them
    is_verb = not hasattr(verb, "commands") or words == ["--help"]
    assert is_verb, f"{page}: {command}: no such verb"
    known = {option for parameter in verb.params for option in parameter.opts}
    assert {w.split("=")[0] for w in words if w.startswith("-")} <= known | {"--help"}


def test_the_cheap_commands_work_as_they_stand(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command in RUN_AS_THEY_STAND:
        words = etude_words(command)
        assert words is not None
        done = warm_etude.etude(*words, cwd=tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def make_run(folder: Path) -> None:
    """A run with three versions, and the model that it began with, as `etude run` leaves it."""
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "tiny"}')
    (folder / "run.yaml").write_text("kind: RLRun\n")
    spec: JsonValue = {"model": {"uri": model.as_uri()}}
    write_state(folder, LocalState(pid=1, updated_unix_ms=0, run={"spec": spec}))
    tensor = TensorSpec(name="up", dtype="BF16", shape=(32, 20), split="rows")
    policy = TrainedPolicy(Schema(grid=1, tensors=(tensor,)), {"up": np.zeros(640, np.uint16)})
    store = open_store(folder.resolve().as_uri())
    weights.claim_epoch(store, holder="test", parent=None, reason="start")
    for number in range(3):
        policy.publish(store, number, complete=not number)
        policy.step()


def test_the_commands_that_look_at_a_run_s_versions_work_as_they_stand(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "demo")
    looks = {command for _, command in commands() if command.startswith("etude weights ")}
    assert len(looks) >= 6
    for command in sorted(looks):
        words = etude_words(command)
        assert words is not None
        done = warm_etude.etude(*words, cwd=tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def test_every_metric_that_a_page_names_exists() -> None:
    metric = re.compile(r"\betude_[a-z_]+")
    known = set(metric.findall((ROOT / "docs/reference/metrics.md").read_text()))
    known |= MetadataSection.model_fields.keys()  # of task.toml
    unknown = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        for name in metric.findall(page.read_text())
        if name not in known
    ]
    assert unknown == []


def test_every_link_between_pages_leads_somewhere() -> None:
    dead = [
        f"{page.relative_to(ROOT)} -> {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert dead == []

"""Every command on the pages about tasks, run as it stands and in the order of its page."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from tests.support import warm_etude
from tests.support.environments import swebench_rows

from etude.common.blobs import open_store
from etude.common.durable_log import encode_segment
from etude.common.run_folder.state import LocalState, write_state
from etude.demo import corpus, model_folder, tokenizer
from etude.demo.problems import Source
from etude.trainer.controller.journal import segments
from etude.trainer.controller.journal.audit import JOURNAL
from etude.v1 import journal_pb2, rewards_pb2, rollout_pb2

ROOT = Path(__file__).parents[2]
PAGES = ("write-a-task", "use-harbor-tasks", "use-swe-bench")
NEEDS = {
    "a network": re.compile(r"https://|--pin\b"),
    "root and buildah": re.compile(r"--build "),
    "root, debootstrap and a kernel": re.compile(r"^etude images build "),
    "a microVM's image": re.compile(r"--driver qemu-microvm"),
}
"""Commands that are left out, by what they need; tests/integration/qemu runs their like."""


def commands(page: str) -> list[str]:
    text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text.replace("\\\n", ""), re.DOTALL)
    lines = (line.split("  #")[0].strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line]


def _model(folder: Path) -> None:
    shown = corpus.demonstrate_all(Source(1).take("traces", 20), 1)
    texts = (text for each in shown for text in corpus.transcript_texts(each.messages))
    model_folder.write(folder, tokenizer.train(texts))


def _run(folder: Path) -> None:
    """A run folder with one rollout in its journal."""
    _model(folder / "model")
    (folder / "run.yaml").write_text("kind: RLRun\n")
    uri = (folder / "model").as_uri()
    state = LocalState(pid=1, updated_unix_ms=0, run={"spec": {"model": {"uri": uri}}})
    write_state(folder, state)
    rollout = rollout_pb2.Rollout(rollout_id="r", ending=rollout_pb2.ENDING_STOPPED)
    scored = journal_pb2.JournalRollout(rollout=rollout, reward=rewards_pb2.RewardRecord(reward=1))
    frame = segments.encode_record(journal_pb2.JournalRecord(sequence=0, rollout=scored))
    data = encode_segment("u", 1, first=0, frames=[frame])
    open_store(folder.resolve().as_uri()).create(f"{JOURNAL}0", data)


def _inputs(folder: Path) -> None:
    """What the pages take for granted."""
    (folder / "examples").symlink_to(ROOT / "examples")
    row = swebench_rows.made(folder)
    mirrors = folder / "mirrors"
    (mirrors / "us__shop.git").rename(mirrors / "owner__name.git")
    row |= {"instance_id": "owner__name-1", "repo": "owner/name"}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    taskset = {"id": "sum-1", "prompt": "Write 3 to answer.txt.", "answer": 3}
    (folder / "taskset.jsonl").write_text(json.dumps(taskset) + "\n")
    (folder / "sum-tests").mkdir()
    (folder / "sum-tests" / "test.sh").write_text("echo 0 > /logs/verifier/reward.txt\n")
    _run(folder / "runs" / "demo")


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_the_page_works_as_it_stands(page: str, tmp_path: Path) -> None:
    _inputs(tmp_path)
    shown = commands(page)
    assert shown
    for command in shown:
        if any(needs.search(command) for needs in NEEDS.values()):
            continue
        verb, *words = shlex.split(command)
        assert verb == "etude"
        done = warm_etude.etude(*words, cwd=tmp_path)
        said = done.stdout + done.stderr
        if "[DriverUnavailable]" in said and os.environ.get("ETUDE_REQUIRE") != "sandbox":
            pytest.skip(f"{command}: {said[-300:]}")
        assert done.returncode == 0, f"{command}\n{said}"


def test_the_rules_of_the_page_are_those_that_are_looked_for() -> None:
    tasks = ROOT / "services" / "envserver" / "etude" / "envserver" / "tasks"
    modules = ("leak_probe.py", "hidden_content.py", "lint.py")
    texts = "".join((tasks / name).read_text() for name in modules)
    used = set(re.findall(r'(?:add\(|rule=)"([a-z-]+)"', texts)) | {"gold-lines", "tests-lines"}
    page = (ROOT / "docs" / "how-to" / "write-a-task.md").read_text()
    table = page.partition("## Lint")[2].partition("\n## ")[0]
    said = {
        rule
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for rule in re.findall(r"`([a-z-]+)`", row)
    }
    assert said == used

"""The command line as a user types it."""

import subprocess
import sys
from pathlib import Path

import pytest

from etude.cli.examples import EXAMPLES


def etude(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from etude.cli.main import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=60)


@pytest.mark.parametrize("verb", sorted(EXAMPLES))
def test_every_verb_has_help_with_two_examples(verb: str) -> None:
    group = ["tasks"] if verb in {"generate", "show", "verify"} else []
    shown = etude(*group, verb, "--help")
    assert shown.returncode == 0
    assert all(example in shown.stdout for example in EXAMPLES[verb])


def test_an_unknown_run_is_not_found_and_says_how_to_name_one(tmp_path: Path) -> None:
    done = etude("watch", "nothing", cwd=tmp_path)
    assert done.returncode == 3
    assert "fix: give a folder" in done.stderr


def test_a_folder_without_a_model_is_refused_before_anything_heavy_starts(tmp_path: Path) -> None:
    done = etude("serve", str(tmp_path))
    assert done.returncode == 3
    assert "config.json" in done.stderr


def test_the_doctor_prints_one_finding_per_check(tmp_path: Path) -> None:
    done = etude("doctor", "--dir", str(tmp_path), "--json")
    names = {line.split('"name": "')[1].split('"')[0] for line in done.stdout.splitlines()}
    assert {"python", "memory", "disk", "object store", "namespaces"} <= names


def test_logs_are_prefixed_with_their_process(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "demo"
    (folder / "logs" / "attempt-0").mkdir(parents=True)
    (folder / "run.yaml").write_text("kind: RLRun\n")
    (folder / "logs" / "attempt-0" / "demo-trainer-0.log").write_text("hello\n")
    (folder / "logs" / "attempt-0" / "demo-inference-0.log").write_text("other\n")
    done = etude("logs", "demo", "--role", "trainer", cwd=tmp_path)
    assert done.stdout == "attempt-0/demo-trainer-0  hello\n"
    assert etude("logs", "demo", "--role", "nobody", cwd=tmp_path).returncode == 3

"""The command line as a user types it."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support.warm_etude import etude

from etude.cli.demo.inputs import PREFIX
from etude.cli.demo.inputs import find_manifest as manifest_of_demo
from etude.cli.examples import EXAMPLES
from etude.cli.verbs.serve import newest_model
from etude.operator.local import run_folder


def started(*arguments: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """One command in a Python of its own, which reads its environment as it starts."""
    command = [sys.executable, "-c", "from etude.cli.main import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=60)


@pytest.mark.parametrize("verb", sorted(EXAMPLES))
def test_every_verb_has_help_with_two_examples(verb: str) -> None:
    name = verb.rsplit(maxsplit=1)[-1]
    words = next(words for each in EXAMPLES[verb] if name in (words := each.split()))
    shown = etude(*words[1 : words.index(name) + 1], "--help")
    assert shown.returncode == 0
    assert all(example in shown.stdout for example in EXAMPLES[verb])


def test_an_unknown_run_is_not_found_and_says_how_to_name_one(tmp_path: Path) -> None:
    done = etude("watch", "nothing", cwd=tmp_path)
    assert done.returncode == 3
    assert "fix: give a folder" in done.stderr


@pytest.mark.parametrize("key", ["etude_1\n2", "“etude_1”"])
def test_a_key_that_no_header_can_have_is_refused_and_not_shown(tmp_path: Path, key: str) -> None:
    words = ("agent", "work", ".", "hi", "--gateway", "http://127.0.0.1:1", "--model", "m")
    done = etude(*words, cwd=tmp_path, env={**os.environ, "ETUDE_API_KEY": key})
    assert done.returncode == 4
    assert "fix: export ETUDE_API_KEY" in done.stderr
    assert "etude_1" not in done.stderr


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


MANIFEST = """
apiVersion: etude.dev/v1alpha1
kind: RLRun
metadata: {name: small}
spec:
  model: {uri: "s3://inputs/model"}
  storage: {uri: "s3://runs/small"}
  phases:
  - name: sft
    type: SupervisedFineTuning
    maxSteps: 1
    optimizer: {learningRate: "1e-3"}
    data: [{name: traces, uri: "s3://inputs/traces.jsonl"}]
  roles: {}
"""
POOL = """
apiVersion: etude.dev/v1alpha1
kind: EnvPool
metadata: {name: other}
spec: {templates: [{name: python}]}
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(MANIFEST)
    return file


def finished(folder: Path) -> None:
    """What a runtime leaves behind a run that is complete."""
    folder.mkdir(parents=True)
    metadata: dict[str, object] = {"name": "small", "namespace": "default", "generation": 1}
    condition: dict[str, object] = {"type": "Complete", "status": "True", "reason": "AllPhasesDone"}
    condition |= {"message": "1 step", "observedGeneration": 1}
    run = {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "RLRun",
        "metadata": metadata,
        "spec": {},
        "status": {"conditions": [condition]},
    }
    (folder / "objects.json").write_text(json.dumps([run]))


def test_a_run_that_is_complete_is_shown_and_no_failure(tmp_path: Path, manifest: Path) -> None:
    finished(tmp_path / "runs" / "small")
    done = etude("run", str(manifest), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "complete already" in done.stderr


def test_a_bad_manifest_is_invalid_and_every_finding_is_shown(
    tmp_path: Path, manifest: Path
) -> None:
    settings = [f"spec.phases[sft].wrong{i}=1" for i in range(20)]
    arguments = [part for setting in settings for part in ("--set", setting)]
    done = etude("run", str(manifest), *arguments, cwd=tmp_path)
    assert done.returncode == 4
    assert all(f"wrong{i} " in done.stderr for i in range(20))


def test_a_run_that_is_running_already_is_a_conflict(tmp_path: Path, manifest: Path) -> None:
    with run_folder.lock_folder(tmp_path / "runs" / "small"):
        done = etude("run", str(manifest), cwd=tmp_path)
    assert done.returncode == 8
    assert f"running already, in process {os.getpid()}" in done.stderr


def test_a_folder_of_another_run_is_a_conflict_and_stays_as_it_is(
    tmp_path: Path, manifest: Path
) -> None:
    folder = tmp_path / "held"
    finished(folder)
    manifest.write_text(MANIFEST.replace("name: small", "name: second"))
    done = etude("run", str(manifest), "--dir", str(folder), cwd=tmp_path)
    assert done.returncode == 8
    assert "the folder holds the run small" in done.stderr
    assert not (folder / "run.yaml").exists()


def test_a_setting_that_is_no_assignment_is_a_usage_error(tmp_path: Path, manifest: Path) -> None:
    done = etude("run", str(manifest), "--set", "foo", cwd=tmp_path)
    assert done.returncode == 2
    assert "is not an assignment" in done.stderr


@pytest.mark.parametrize("more", [("lint",), ("run",), ("run", "--dir", "folder")])
def test_a_file_that_is_far_too_long_is_not_read(tmp_path: Path, more: tuple[str, ...]) -> None:
    file = tmp_path / "big.yaml"
    with file.open("wb") as sparse:
        sparse.truncate(200 * 2**30)
    done = etude(*more, str(file), cwd=tmp_path)
    assert done.returncode == 4
    assert "more than 3145728 bytes" in done.stderr


def test_a_terminal_of_another_encoding_gets_what_it_can_show(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("kind: RLRun\n")
    words = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = os.environ | words | {"LC_ALL": "C"}
    for verb in ("watch", "report"):
        done = started(verb, str(tmp_path), env=environment)
        assert done.returncode == 0, done.stderr


def test_the_folder_named_for_the_examples_inputs_is_where_the_manifest_looks() -> None:
    generate, run = EXAMPLES["run"]
    folder = Path(run.rpartition("--dir ")[2])
    assert generate == f"etude tasks generate {folder / PREFIX}"
    how_to = (manifest_of_demo().parents[2] / "docs/how-to/run-locally.md").read_text()
    assert generate in how_to
    assert run in how_to


def test_a_pool_may_stand_before_the_run(tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    file.write_text(f"{POOL}---{MANIFEST}")
    finished(tmp_path / "runs" / "small")
    assert etude("run", str(file), cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    "content",
    [b"kind: RLRun\nmetadata: {}\n", b"\xff\xfe", b"[", b"", b"kind: RLRun\nmetadata: {name: ..}"],
)
def test_a_file_without_a_named_run_is_invalid(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    done = etude("run", str(file), cwd=tmp_path)
    assert done.returncode == 4
    assert "fix: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("verb", ["run", "doctor"])
def test_a_folder_that_cannot_be_made_is_explained(
    tmp_path: Path, manifest: Path, verb: str
) -> None:
    arguments = [str(manifest)] if verb == "run" else []
    done = etude(verb, *arguments, "--dir", str(manifest / "below"), cwd=tmp_path)
    assert done.returncode == 1
    assert f"{manifest}/below" in done.stderr
    assert "fix: " in done.stderr
    assert "Traceback" not in done.stderr


def test_only_a_model_whose_checkpoint_is_whole_is_served(tmp_path: Path) -> None:
    whole, half = (tmp_path / "checkpoints" / f"{step:012d}" for step in (3, 20))
    for folder in (whole, half):
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text("{}")
    (whole / "manifest.json").write_text("{}")
    assert newest_model(tmp_path) == whole / "model"
    assert newest_model(whole / "model") == whole / "model"

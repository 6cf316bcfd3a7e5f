"""Candidates for a release: versions of one run, made once and kept by what they follow from."""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from etude.agent.chat import Message
from etude.cli.releases.client import Evaluated, read_evaluation
from etude.common.api import yaml_documents
from etude.common.errors import Problem, UserError
from etude.demo import corpus
from etude.demo.generate import Sizes, write_new_folder
from etude.demo.problems import Source
from etude.demo.realtime import warm_up
from etude.demo.realtime.inputs import ANSWERS, QUESTIONS
from etude.demo.realtime.warm_up import WarmPolicy
from etude.operator.local.run_folder import load_objects

NUM_DEMONSTRATIONS = 1_600
"""Of which the solved ones are kept."""
NUM_QUESTIONS = 3
"""With which an asking policy ends its work: more than any user answers."""
TRAINED_TASKS = 64
"""Of the steps that publish a version."""
MANIFEST, EVALUATION = "candidates.yaml", "evalrun.yaml"
MARGIN = 0.1
"""Largest loss of success: with so few tasks a smaller one would not be told from chance."""
SERVED = "served"
"""Name of the evaluation of the version in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """A finished run, and its checkpoints that publish a version."""

    folder: Path
    served: str
    """Checkpoint of the version in use."""
    asking: str
    """Checkpoint of one as good on held-out tasks, that ends its work with questions."""
    damaged: str
    """Checkpoint of one that forgot how to work."""

    @property
    def served_version(self) -> str:
        """Policy version of the checkpoint in use, which was evaluated."""
        return read_evaluation(self.folder, SERVED).result.policy

    @property
    def store(self) -> Path:
        """Folder of the run's weights."""
        return self.folder / "weights"

    def describe_run(self) -> dict[str, Any]:
        """Name, uid and spec of the run."""
        run: Any = next(each for each in load_objects(self.folder) if each["kind"] == "RLRun")
        metadata = run["metadata"]
        return {"name": metadata["name"], "uid": metadata["uid"], "spec": run["spec"]}

    def evaluate(self, checkpoint: str, name: str, *, baseline: str = "") -> Evaluated:
        """Evaluate a checkpoint on the held-out tasks; blocks until the result is there.

        Args:
            checkpoint: its name.
            name: of the EvalRun.
            baseline: EvalRun to compare it with; empty for none.

        Raises:
            UserError: the evaluation failed.
        """
        data = yaml_documents.read_bounded(warm_up.find_manifest(EVALUATION))
        documents: list[Any] = [each.value for each in yaml_documents.parse_documents(data)]
        evaluation = documents[0]
        evaluation["metadata"]["name"] = name
        evaluation["spec"]["checkpointRef"]["name"] = checkpoint
        if baseline:
            evaluation["spec"]["comparison"] = {
                "baselineRef": {"name": baseline},
                "margins": [{"metric": "Success", "largestLoss": str(MARGIN)}],
            }
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml_documents.dump_documents(documents), "utf-8")
        # It exits with 1 for a candidate that is worse: the gate is not asked here.
        warm_up.run_etude(["eval", str(file), str(self.folder)], self.folder, may_refuse=True)
        return read_evaluation(self.folder, name)


def prepare_candidates(root: Path, policy: WarmPolicy, seed: int) -> Candidates:
    """Make the versions of a seed, and evaluate the one in use; or find those of an earlier call.

    Args:
        root: folder of all warm-ups.
        policy: to start from.
        seed: of everything.

    Raises:
        UserError: the run or the evaluation failed.
    """
    folder = (root / f"candidates-{name_content(policy, seed)}").resolve()
    inputs = folder / "inputs" / "etude" / "realtime"
    if not inputs.is_dir():
        inputs.parent.mkdir(parents=True, exist_ok=True)
        write_new_folder(inputs, lambda new: write_inputs(new, policy, seed))
    if not (folder / "complete").exists():
        model = f"spec.model.uri={policy.model.resolve().as_uri()}"
        manifest = str(warm_up.find_manifest(MANIFEST))
        run = ["run", manifest, "--dir", str(folder), "--plain", "--set", model]
        warm_up.run_etude([*run, "--set", f"spec.model.seed={seed}"], folder)
        found = find_candidates(folder)
        found.evaluate(found.served, SERVED)
        (folder / "complete").touch()
    return find_candidates(folder)


def name_content(policy: WarmPolicy, seed: int) -> str:
    """Name what candidates follow from: the policy, the manifests and this module."""
    files = [Path(__file__), *map(warm_up.find_manifest, (MANIFEST, EVALUATION))]
    parts = [b"%d" % seed, policy.model.parent.name.encode()]
    return warm_up.hash_parts([*parts, *(file.read_bytes() for file in files)])


def find_candidates(folder: Path) -> Candidates:
    """Find the three checkpoints by their steps, which follow from the phases.

    Raises:
        UserError: the run left none of a step.
    """
    objects = load_objects(folder)
    run: Any = next(each for each in objects if each["kind"] == "RLRun")
    steps: dict[str, int] = {}
    total = 0
    for phase in run["spec"]["phases"]:
        total += phase["maxSteps"]
        steps[phase["name"]] = total
    names = {
        each["status"].get("step"): str(each["metadata"]["name"])
        for each in objects
        if each["kind"] == "Checkpoint"
    }
    try:
        served, asking, damaged = (
            names[steps[f"publish-{name}"]] for name in ("served", "asking", "damaged")
        )
    except KeyError as error:
        what = f"the run left no checkpoint of step {error}"
        fix = "delete the folder, and start again"
        raise UserError(Problem("NotFound", what, str(folder), fix)) from error
    return Candidates(folder=folder, served=served, asking=asking, damaged=damaged)


def write_inputs(folder: Path, policy: WarmPolicy, seed: int) -> Mapping[str, object]:
    """Write tasks, transcripts that end with the right fix, and the same with questions behind it.

    Returns:
        The number of transcripts.
    """
    source = Source(seed)
    # Measured tasks first: none of them is shown.
    list(source.take("held-out", Sizes().held_out))
    shown = corpus.demonstrate_all(source.take("candidates", NUM_DEMONSTRATIONS), seed)
    solved = [list(each.messages) for each in shown if each.is_solved]
    for split in (policy.tasks, policy.held_out):
        tasks = sorted(split.iterdir())
        for task in tasks[:TRAINED_TASKS] if split is policy.tasks else tasks:
            shutil.copytree(task, folder / "tasks" / split.name / task.name)
    data = folder / "data"
    data.mkdir()
    # Plain files, which damage a policy.
    shutil.copyfile(policy.repositories, data / "repositories.jsonl")
    _write_rows(data / "solved.jsonl", solved)
    _write_rows(data / "asking.jsonl", [ask_at_end(each) for each in solved])
    return {"solved": len(solved)}


def ask_at_end(messages: Sequence[Message]) -> list[Message]:
    """Replace the message that ends the work by questions, each but the last with an answer."""
    asked: list[Message] = [*messages[:-1]]
    turns = zip(cycle(QUESTIONS), cycle(ANSWERS), strict=False)
    for question, answer in islice(turns, NUM_QUESTIONS):
        asked.append({"role": "assistant", "content": question})
        asked.append({"role": "user", "content": answer})
    return asked[:-1]


def _write_rows(path: Path, transcripts: Iterable[Sequence[Message]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for each in transcripts:
            file.write(json.dumps({"messages": each}, separators=(",", ":")) + "\n")

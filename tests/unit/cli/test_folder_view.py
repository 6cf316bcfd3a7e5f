"""From files in a run folder to the view."""

import json
import os
from pathlib import Path

from pydantic import JsonValue

from etude.cli.folder_view import FolderViewer
from etude.common.run_folder.state import LocalPod, LocalState, write_state


def test_an_empty_folder_is_a_run_that_has_not_started(tmp_path: Path) -> None:
    assert FolderViewer(tmp_path).view().phase == "Not started"


def test_rows_are_followed_as_they_are_written_and_a_torn_line_waits(tmp_path: Path) -> None:
    viewer = FolderViewer(tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    evaluation = json.dumps({"kind": "eval", "success": 0.25, "time_s": 1})
    metrics.write_text(evaluation + "\n" + evaluation[:10])
    assert viewer.view().held_out == (0.25,)
    metrics.write_text(evaluation + "\n" + evaluation + "\n")
    assert viewer.view().held_out == (0.25, 0.25)


def test_a_line_that_is_no_row_is_passed_over(tmp_path: Path) -> None:
    good = json.dumps({"kind": "eval", "success": 0.25, "time_s": 1}).encode()
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe{\n7\n" + good + b"\n")
    assert FolderViewer(tmp_path).view().held_out == (0.25,)


def test_the_first_broken_condition_explains_a_run(tmp_path: Path) -> None:
    run: dict[str, JsonValue] = {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "RLRun",
        "metadata": {"name": "demo"},
        "spec": _smallest_spec(),
        "status": {
            "phase": "Provisioning",
            "conditions": [
                {"type": "Accepted", "status": "True", "reason": "Accepted"},
                {
                    "type": "RolesReady",
                    "status": "False",
                    "reason": "PodsNotReady",
                    "message": "inference 0/1 ready",
                },
            ],
        },
    }
    pod = LocalPod(name="demo-trainer-0", role="trainer", state="Ready", restarts=2)
    state = LocalState(pid=os.getpid(), updated_unix_ms=1, run=run, pods=(pod,))
    write_state(tmp_path, state)
    view = FolderViewer(tmp_path).view()
    assert view.why == "waiting: inference 0/1 ready"
    assert view.pods[0].detail == "2 restarts"


def _smallest_spec() -> dict[str, JsonValue]:
    return {
        "model": {"uri": "file:///m"},
        "storage": {"uri": "file:///s"},
        "roles": {},
        "phases": [
            {
                "name": "sft",
                "type": "SupervisedFineTuning",
                "maxSteps": 1,
                "optimizer": {"learningRate": "1e-3"},
                "data": [{"name": "d", "uri": "file:///d"}],
            }
        ],
    }

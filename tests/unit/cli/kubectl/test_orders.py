"""What resumes a run, by who suspended it, and what asks for a checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support import seen_runs
from tests.support.stub_kubectl import StubKubectl, complaint, shown

from etude.cli.kubectl.client import Kubectl
from etude.cli.kubectl.verbs import orders, saving
from etude.cli.kubectl.verbs.orders import RESUME, answer_to
from etude.cli.kubectl.verbs.saving import request
from etude.common.api.checkpoint import CheckpointSpec
from etude.common.errors import UserError
from etude.operator import names

SINCE = "2026-01-01T00:00:00Z"


def run(reason: str | None, *, suspend: bool = False) -> dict[str, Any]:
    hold = {"reason": reason, "message": "why", "since": SINCE}
    status = {} if reason is None else {"hold": hold}
    metadata = {"name": "demo", "uid": "u"}
    return {"metadata": metadata, "spec": {"suspend": suspend}, "status": status}


def test_a_run_that_its_spec_suspends_is_its_users_to_resume() -> None:
    assert answer_to(run(None), {}) is None
    assert answer_to(run(None, suspend=True), {}) is None
    assert answer_to(run("FailureRule", suspend=True), {}) is None
    assert answer_to({"metadata": {"name": "demo"}, "spec": {}}, {}) is None


def test_a_rule_is_overruled_by_an_annotation_that_names_this_very_hold() -> None:
    assert answer_to(run("FailureRule"), {}) == {"metadata": {"annotations": {RESUME: SINCE}}}
    assert RESUME == names.RESUME


def test_a_spent_budget_has_to_be_raised() -> None:
    with pytest.raises(UserError, match="BudgetExceeded: why") as refused:
        answer_to(run("BudgetExceeded"), {})
    assert "--gpu-hours" in refused.value.problem.fix
    raised = {"spec": {"budget": {"gpuHours": "9"}}}
    assert answer_to(run("BudgetExceeded"), {"gpuHours": "9"}) == raised


def suspended() -> dict[str, Any]:
    found = seen_runs.run()
    found["spec"] |= {"suspend": True}
    return found


def test_a_suspended_run_whose_budget_is_raised_goes_on_too(
    stub: StubKubectl, etude: Callable[..., Any]
) -> None:
    stub.teach_cluster(suspended())
    stub.teach("patch", shown({}))
    told = etude("resume", "demo", "--gpu-hours", "40")
    assert stub.patches() == [{"spec": {"budget": {"gpuHours": "40"}, "suspend": False}}]
    assert told.code == 0
    assert told.err.endswith("pods come, then it goes on\n")


def test_of_a_run_that_nobody_suspended_no_pods_are_promised(
    stub: StubKubectl, etude: Callable[..., Any]
) -> None:
    stub.teach_cluster(seen_runs.run())
    stub.teach("patch", shown({}))
    told = etude("resume", "demo", "--gpu-hours", "40")
    assert stub.patches() == [{"spec": {"budget": {"gpuHours": "40"}}}]
    assert "it was not suspended, and goes on" in told.err


@pytest.mark.parametrize("end", ["Complete", "Failed"])
@pytest.mark.parametrize("words", [("suspend",), ("resume",), ("resume", "--gpu-hours", "40")])
def test_a_run_that_is_over_takes_no_order(
    stub: StubKubectl, etude: Callable[..., Any], end: str, words: tuple[str, ...]
) -> None:
    stub.teach_cluster(seen_runs.run(seen_runs.condition(end, "True", "Finished")))
    told = etude(words[0], "demo", *words[1:])
    assert told.code == 8
    assert f"the run is over: {end}; nothing is left to {words[0]}" in told.err
    assert stub.asked("patch") == []


HICCUP = complaint("Error from server (ServiceUnavailable): the server is currently unable")


def test_whoever_waits_for_a_suspension_goes_on_when_the_api_server_is_not_itself(
    stub: StubKubectl, etude: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "INTERVAL_S", 0.0)
    rests = seen_runs.run(seen_runs.condition("Suspended", "True", "ByUser"))
    stub.teach("get rlruns.etude.dev", shown(seen_runs.run()), HICCUP, shown(rests))
    stub.teach_cluster(rests)
    stub.teach("patch", shown({}))
    told = etude("suspend", "demo", "--wait")
    assert told.code == 0
    assert "does not answer as it should" in told.err
    assert "demo is suspended" in told.err


ANSWERS = """#!/bin/sh
case "$*" in
  "get rlruns"*) echo '{"metadata": {"name": "demo", "uid": "u"}}' ;;
  create*) cat > /dev/null; echo '{"metadata": {"name": "demo-manual-1"}}' ;;
  "get checkpoints"*)
    if [ ! -e asked ]; then
      touch asked
      echo "Unable to connect to the server: dial tcp 10.0.0.1:443: i/o timeout" >&2
      exit 1
    fi
    echo '{"status": {"phase": "Ready", "uri": "s3://runs/demo", "step": 7}}' ;;
esac
"""


def test_whoever_waits_for_a_checkpoint_goes_on_when_nobody_answers_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "kubectl"
    program.write_text(ANSWERS)
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(saving, "INTERVAL_S", 0.0)
    saving.save(Kubectl(program=str(program)), "demo", wait=True)
    told = capsys.readouterr()
    assert "Unable to connect" in told.out + told.err
    assert "demo-manual-1: Ready at step 7" in told.out + told.err


def test_a_request_is_a_checkpoint_that_the_api_takes() -> None:
    CheckpointSpec.model_validate(request(run(None))["spec"])

"""What resumes a run, by who suspended it, and what asks for a checkpoint."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.kube import observed_runs
from tests.support.kube.stub_kubectl import StubKubectl, complaint, shown

from etude.cli.kubectl.verbs import checkpoint, suspend
from etude.cli.kubectl.verbs.checkpoint import checkpoint_request
from etude.cli.kubectl.verbs.suspend import RESUME, resume_patch
from etude.common.api.checkpoint.spec import CheckpointSpec
from etude.common.errors import UserError
from etude.operator import names

SINCE = "2026-01-01T00:00:00Z"


def run(reason: str | None, *, suspend: bool = False) -> dict[str, Any]:
    hold = {"reason": reason, "message": "why", "since": SINCE}
    status = {} if reason is None else {"hold": hold}
    metadata = {"name": "demo", "uid": "u"}
    return {"metadata": metadata, "spec": {"suspend": suspend}, "status": status}


def test_a_run_that_its_spec_suspends_is_its_users_to_resume() -> None:
    assert resume_patch(run(None), {}) is None
    assert resume_patch(run(None, suspend=True), {}) is None
    assert resume_patch(run("FailureRule", suspend=True), {}) is None
    assert resume_patch({"metadata": {"name": "demo"}, "spec": {}}, {}) is None


def test_a_rule_is_overruled_by_an_annotation_that_names_this_very_hold() -> None:
    assert resume_patch(run("FailureRule"), {}) == {"metadata": {"annotations": {RESUME: SINCE}}}
    assert RESUME == names.RESUME


def test_a_spent_budget_has_to_be_raised() -> None:
    with pytest.raises(UserError, match="BudgetExceeded: why") as refused:
        resume_patch(run("BudgetExceeded"), {})
    assert "--gpu-hours" in refused.value.problem.fix
    raised = {"spec": {"budget": {"gpuHours": "9"}}}
    assert resume_patch(run("BudgetExceeded"), {"gpuHours": "9"}) == raised


def suspended() -> dict[str, Any]:
    found = observed_runs.run()
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
    stub.teach_cluster(observed_runs.run())
    stub.teach("patch", shown({}))
    told = etude("resume", "demo", "--gpu-hours", "40")
    assert stub.patches() == [{"spec": {"budget": {"gpuHours": "40"}}}]
    assert "it was not suspended, and goes on" in told.err


@pytest.mark.parametrize("end", ["Complete", "Failed"])
@pytest.mark.parametrize("words", [("suspend",), ("resume",), ("resume", "--gpu-hours", "40")])
def test_a_run_that_is_over_takes_no_order(
    stub: StubKubectl, etude: Callable[..., Any], end: str, words: tuple[str, ...]
) -> None:
    stub.teach_cluster(observed_runs.run(observed_runs.condition(end, "True", "Finished")))
    told = etude(words[0], "demo", *words[1:])
    assert told.code == 8
    assert f"the run is over: {end}; nothing is left to {words[0]}" in told.err
    assert stub.asked("patch") == []


HICCUP = complaint("Error from server (ServiceUnavailable): the server is currently unable")


def test_whoever_waits_for_a_suspension_goes_on_when_the_api_server_is_not_itself(
    stub: StubKubectl, etude: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspend, "INTERVAL_S", 0.0)
    rests = observed_runs.run(observed_runs.condition("Suspended", "True", "ByUser"))
    stub.teach("get rlruns.etude.dev", shown(observed_runs.run()), HICCUP, shown(rests))
    stub.teach_cluster(rests)
    stub.teach("patch", shown({}))
    told = etude("suspend", "demo", "--wait")
    assert told.code == 0
    assert "does not answer as it should" in told.err
    assert "demo is suspended" in told.err


def test_whoever_may_not_list_events_is_told_so_once_for_a_wait(
    stub: StubKubectl, etude: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspend, "INTERVAL_S", 0.0)
    rests = observed_runs.run(observed_runs.condition("Suspended", "True", "ByUser"))
    stub.teach("get rlruns.etude.dev", *[shown(observed_runs.run())] * 4, shown(rests))
    whose = 'User "eve" cannot list resource "events" in API group "" in the namespace "lab"'
    stub.teach("get events", complaint(f"Error from server (Forbidden): forbidden: {whose}"))
    stub.teach_cluster(rests)
    stub.teach("patch", shown({}))
    told = etude("suspend", "demo", "--wait")
    assert told.code == 0
    assert told.err.count("eve may not list events in namespace lab") == 1


AWAY = complaint("Unable to connect to the server: dial tcp 10.0.0.1:443: i/o timeout")
MADE = {"kind": "Checkpoint", "metadata": {"name": "demo-manual-1"}}


def saved(phase: str, reason: str, message: str = "", **status: Any) -> dict[str, Any]:
    ready = observed_runs.condition("Ready", str(phase == "Ready"), reason, message)
    return {**MADE, "status": {"phase": phase, "conditions": [ready], **status}}


READY = saved("Ready", "CheckpointVerified", uri="s3://runs/demo", step=7)


def test_a_run_is_asked_for_a_checkpoint_that_it_writes_after_its_next_step(
    stub: StubKubectl, etude: Callable[..., Any]
) -> None:
    stub.teach_cluster(observed_runs.run())
    stub.teach("create", shown(MADE))
    told = etude("checkpoint", "demo", "--now")
    assert (told.code, told.out) == (0, "")
    assert "demo-manual-1: demo writes it after its next step; it is kept" in told.err
    assert stub.made()["spec"]["runRef"] == {"name": "demo", "uid": "uid-demo"}
    as_json = etude("checkpoint", "demo", "--now", "-o", "json")
    assert json.loads(as_json.out) == MADE


def test_whoever_waits_for_a_checkpoint_goes_on_when_nobody_answers_for_a_moment(
    stub: StubKubectl, etude: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "INTERVAL_S", 0.0)
    stub.teach("create", shown(MADE))
    stub.teach("get checkpoints.etude.dev demo-manual-1", shown(MADE), AWAY, HICCUP, shown(READY))
    stub.teach_cluster(observed_runs.run())
    told = etude("checkpoint", "demo", "--now", "--wait", "-o", "json")
    assert told.code == 0
    for words in ("not looked at it yet", "Unable to connect", "does not answer as it should"):
        assert words in told.err
    assert "demo-manual-1: Ready at step 7" in told.err
    assert json.loads(told.out) == READY


def test_whoever_waits_for_a_checkpoint_is_told_why_the_run_does_not_write_it(
    stub: StubKubectl, etude: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "INTERVAL_S", 0.0)
    loading = ("Ready", "False", "Loading", "it loads"), ("Progressing", "False", "Loading")
    starts = observed_runs.run(*(observed_runs.condition(*each) for each in loading))
    waiting = saved("Pending", "WaitingForRun", "it is written once it does")
    stub.teach("create", shown(MADE))
    stub.teach("get checkpoints.etude.dev demo-manual-1", shown(waiting), shown(READY))
    stub.teach_cluster(starts, [observed_runs.pod(), observed_runs.pool()])
    told = etude("checkpoint", "demo", "--now", "--wait")
    assert told.code == 0
    assert "demo does not run now and writes it once it does: kubectl etude why demo" in told.err
    assert "Pending: it is written once it does; demo waits: " in told.err


def test_of_a_suspended_run_a_checkpoint_is_asked_but_not_waited_for(
    stub: StubKubectl, etude: Callable[..., Any]
) -> None:
    stub.teach_cluster(suspended())
    stub.teach("create", shown(MADE))
    refused = etude("checkpoint", "demo", "--now", "--wait")
    assert refused.code == 8
    assert "writes nothing until it is resumed" in refused.err
    assert stub.asked("create") == []
    told = etude("checkpoint", "demo", "--now")
    assert told.code == 0
    assert "writes it once it goes on: kubectl etude resume demo" in told.err


def test_a_run_that_is_over_writes_no_checkpoint(
    stub: StubKubectl, etude: Callable[..., Any]
) -> None:
    stub.teach_cluster(observed_runs.run(observed_runs.condition("Complete", "True", "Finished")))
    told = etude("checkpoint", "demo", "--now")
    assert told.code == 8
    assert "nothing is left to save" in told.err


def test_a_list_of_checkpoints_is_not_waited_for(etude: Callable[..., Any]) -> None:
    assert etude("checkpoint", "demo", "--wait").code == 2


def test_a_request_is_a_checkpoint_that_the_api_takes() -> None:
    CheckpointSpec.model_validate(checkpoint_request(run(None))["spec"])


def test_a_frozen_phase_is_released_by_its_rules_up_to_the_present_step() -> None:
    frozen = run("MonitorFroze")
    rules = [
        {"name": "BrokenCalls", "action": "Freeze"},
        {"name": "MaskedShare", "action": "Freeze", "afterStep": 50},
        {"name": "JudgeGap", "action": "Penalise"},
    ]
    frozen["spec"]["phases"] = [{"name": "sft"}, {"name": "rl", "seed": 5, "monitors": rules}]
    frozen["status"]["phases"] = [{"name": "sft", "step": 4}, {"name": "rl", "step": 40}]
    patch = resume_patch(frozen, {})
    assert patch is not None
    assert patch["metadata"] == {"annotations": {RESUME: SINCE}}
    released = {"name": "BrokenCalls", "action": "Freeze", "afterStep": 40}
    assert patch["spec"] == {
        "phases": [{"name": "sft"}, {"name": "rl", "seed": 5, "monitors": [released, *rules[1:]]}]
    }
    frozen["spec"]["phases"] = patch["spec"]["phases"]
    assert resume_patch(frozen, {}) == {"metadata": {"annotations": {RESUME: SINCE}}}

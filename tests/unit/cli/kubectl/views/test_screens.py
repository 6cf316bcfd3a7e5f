"""What `status`, `top`, `checkpoint` and `watch` show, and the help of every verb."""

import subprocess
import sys

import pytest
from tests.support.kube import observed_runs
from tests.support.kube.observed_runs import before, checkpoint, condition, event, pod, run, seen
from typer.testing import CliRunner

from etude.cli.kubectl import main
from etude.cli.kubectl.diagnose.run_objects import RunObjects, steps_per_hour
from etude.cli.kubectl.diagnose.why import diagnose
from etude.cli.kubectl.durations import format_duration
from etude.cli.kubectl.main import EXAMPLES
from etude.cli.kubectl.views import live, status, top
from etude.cli.live_view import format_view
from etude.cli.output import print_whole


def shown(what: RunObjects) -> dict[str, str]:
    return dict(status.rows(what, observed_runs.NOW))


def test_the_screen_has_what_is_known_and_no_row_for_what_is_not() -> None:
    working = run(
        attempt=1,
        reward={"mean": "0.42", "ewma": "0.4"},
        staleness={"p50": "1", "max": 3},
        policyVersion=119,
        ettr="0.97",
        active={"seconds": 60, "since": before(7_140)},
        lastCheckpoint={"name": "demo-s1", "step": 12, "time": before(720)},
        environments=[
            {"name": "repos", "pool": "swe", "ready": True, "driver": "GVisor", "leased": 9}
        ],
    )
    rows = shown(seen(working, pod(), pod("inference", ready=False)))
    assert status.headline(seen(working)) == "lab/demo · Running · rl 12/60 · attempt 1"
    assert rows["reward"] == "0.42 in the last step, 0.4 smoothed"
    assert rows["policy"] == "version 119 · staleness p50 1, max 3"
    assert rows["pods"] == "1 of 2 ready; not demo-inference-0"
    assert rows["environments"] == "repos: 9 leased from swe (GVisor)"
    assert rows["checkpoint"] == "demo-s1 · step 12 · 12 m 0 s ago"
    assert rows["time"] == "2 h 0 m with pods · ETTR 97 %"
    assert not {"failures", "condition", "rollouts"} & set(rows)


def test_only_conditions_that_somebody_should_know_of_are_shown_each_sentence_once() -> None:
    waits = [
        condition(kind, "False", "Unschedulable", "no node") for kind in ("RolesReady", "Ready")
    ]
    found = list(status.rows(seen(run(*waits)), observed_runs.NOW))
    told = [text for title, text in found if title == "condition"]
    assert told == ["RolesReady is False, Unschedulable: no node"]
    resting = condition("RolesReady", "False", "Finished")
    assert "condition" not in shown(seen(run(resting)))


def test_of_a_traceback_the_last_line_is_shown() -> None:
    words = "Traceback:\n  File x\nOSError: no room left\n"
    failed = condition("Degraded", "True", "RoleFailed", words)
    told = "Degraded is True, RoleFailed: … OSError: no room left"
    assert shown(seen(run(failed)))["condition"] == told
    assert diagnose(seen(run(failed)), observed_runs.NOW).evidence[0] == "… OSError: no room left"


def test_steps_per_hour_are_those_between_the_newest_two_checkpoints() -> None:
    saved = [
        checkpoint(10, 7_200),
        checkpoint(20, 3_600),
        checkpoint(40, 1_800),
        checkpoint(40, 60),
    ]
    assert steps_per_hour(saved) == pytest.approx(20 / (3_540 / 3_600))
    assert steps_per_hour(saved[:1]) is None
    assert steps_per_hour([]) is None


def test_a_checkpoint_that_was_asked_for_says_nothing_of_the_pace() -> None:
    """It is as old as the request, and its step stands in its status."""
    saved = [checkpoint(100, 7_200), checkpoint(200, 3_600)]
    asked, held = checkpoint(0, 3_599), checkpoint(0, 3_601)
    asked["spec"]["reason"] = held["spec"]["reason"] = "Manual"
    held["status"] |= {"step": 201, "uri": "s3://runs/demo"}
    assert steps_per_hour([*saved, asked, held]) == pytest.approx(100)


def test_top_counts_the_gpus_of_any_maker() -> None:
    def asking(role: str, **requests: str) -> dict[str, object]:
        return pod(role, containers=[{"name": role, "resources": {"requests": requests}}])

    mixed = run()
    mixed["spec"]["roles"] |= {
        "trainer": {"gpuResource": "amd.com/gpu"},
        "inference": {"gpuResource": "nvidia.com/mig-1g.10gb"},
        "rewards": {},
    }
    pods = (
        asking("trainer", **{"amd.com/gpu": "8", "example.com/nic": "1"}),
        asking("inference", **{"nvidia.com/mig-1g.10gb": "2", "cpu": "4"}),
        asking("rewards", **{"nvidia.com/gpu": "1"}),
    )
    assert top.run_usage(seen(mixed, *pods)).gpus == 11


def test_top_counts_what_is_requested_and_what_is_ready_and_sorts_by_it() -> None:
    gpus = [{"name": "c", "resources": {"requests": {"nvidia.com/gpu": "4"}}}]
    large = seen(run(), pod(containers=gpus), pod("inference", ready=False, containers=gpus))
    small = seen(run(name="another"))
    lines = [top.run_usage(each) for each in (small, large)]
    first, second = top.sort_usages(lines, "gpus")
    assert (first.name, first.gpus, first.ready, first.pods) == ("demo", 8, 1, 2)
    assert [each.name for each in top.sort_usages(lines, "name")] == ["another", "demo"]
    assert second.gpus == 0


def test_the_live_view_keeps_the_rewards_of_every_step_it_saw_once() -> None:
    rows: list[dict[str, object]] = []
    for step, mean in ((12, "0.1"), (12, "0.1"), (13, "0.3")):
        counted = {"current": step, "target": 60, "text": f"{step}/60"}
        status = seen(run(step=counted, reward={"mean": mean, "ewma": mean})).status
        rows += live.new_rows(status, rows, observed_runs.NOW)
    assert [row["reward_mean"] for row in rows] == [0.1, 0.3]


def test_the_live_view_says_why_a_run_stands_still_and_what_happened() -> None:
    stuck = run(condition("Progressing", "False", "Loading", "the controller loads its state"))
    what = seen(stuck, pod("trainer", ready=False), events=[event(stuck, "Loading", "a model")])
    view = live.cluster_view(what, diagnose(what, observed_runs.NOW), [])
    assert "demo waits: " in view.why
    assert view.pods[0].state == "Running"
    assert view.events[-1].endswith("Loading: a model")
    assert "demo waits: " in format_view(view)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-5, "0 s"), (119, "119 s"), (120, "2 m 0 s"), (3_600, "1 h 0 m"), (90_061, "1 d 1 h")],
)
def test_a_span_is_told_in_its_two_largest_units(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


@pytest.mark.parametrize("verb", sorted(main.VERBS))
def test_every_verb_has_help_with_two_examples(verb: str) -> None:
    told = CliRunner().invoke(main.app, [verb, "--help"], terminal_width=200)
    assert told.exit_code == 0
    assert len(EXAMPLES[verb]) == 2
    assert all(example in told.stdout for example in EXAMPLES[verb])
    assert "--kubeconfig" in told.stdout
    assert CliRunner().invoke(main.app, [verb, "-h"], terminal_width=200).stdout == told.stdout


def test_the_verbs_are_listed_without_loading_the_api() -> None:
    program = (
        "import sys, etude.cli.kubectl.main\n"
        "found = [n for n in ('pydantic', 'numpy', 'yaml', 'etude.v1') if n in sys.modules]\n"
        "assert not found, found\n"
    )
    done = subprocess.run(
        (sys.executable, "-c", program), capture_output=True, check=False, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_table_in_a_pipe_is_as_wide_as_it_needs_to_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long = "a-name-of-forty-characters-is-the-longest"
    line = top.run_usage(seen(run(name=long)))
    print_whole(top.usage_table([line, line], with_namespace=True))
    told = capsys.readouterr().out
    assert told.count(long) == 2
    assert len(told.splitlines()) == 3

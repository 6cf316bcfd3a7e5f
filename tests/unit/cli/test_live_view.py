"""What the live view shows."""

import io

import pytest
from rich.console import Console

from etude.cli.live_view import PodLine, RunView, draw_view, format_view, sparkline

VIEW = RunView(
    name="demo",
    phase="Running",
    active_phase="rl",
    step=12,
    target=40,
    step_seconds=4.0,
    reward=0.62,
    rewards=(0.3, 0.4, 0.62),
    held_out=(0.36, 0.68),
    greedy=(0.45,),
    policy_version=13,
    tokens_per_second=2100,
    mismatch=2e-5,
    swap_ms=28,
    in_flight=64,
    completed=1536,
    environments="64 leased from demo-repos (process, Weak isolation)",
    pods=(PodLine(name="demo-trainer-0", state="Ready"),),
    events=("12:00:01 version 13 serves",),
)


def drawn(view: RunView, width: int) -> str:
    written = io.StringIO()
    screen = Console(file=written, width=width, force_terminal=False, color_system=None)
    screen.print(draw_view(view))
    return written.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_view_fits_the_terminal_and_shows_what_matters(width: int) -> None:
    text = drawn(VIEW, width)
    assert all(len(line) <= width for line in text.splitlines())
    for fact in ("Running", "rl 12/40", "0.62", "0.36 → 0.68", "version 13", "process", "Weak"):
        assert fact in text


def test_a_run_that_waits_says_why() -> None:
    view = RunView(name="demo", phase="Provisioning", why="waiting: inference 0/1 ready")
    assert "waiting: inference 0/1 ready" in drawn(view, 80)
    assert format_view(view) == "Provisioning | version 0 | waiting: inference 0/1 ready"


def test_a_log_line_holds_step_reward_and_held_out_success() -> None:
    assert format_view(VIEW).startswith(
        "Running | rl 12/40 | reward 0.62 | held-out 0.68 | version 13"
    )


def test_a_sparkline_keeps_its_width_and_its_ends() -> None:
    line = sparkline([float(i) for i in range(1000)], width=32)
    assert len(line) <= 32
    assert (line[0], line[-1]) == ("▁", "█")
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"

"""The demo reaches its targets on every seed, and whatever is killed."""

import pytest


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_gets_better_on_every_seed(demo, seed: int) -> None:
    demo.seed = seed
    demo.start()
    code, output = demo.finish()
    assert code == 0, output
    assert output.splitlines()[-1].startswith("demo: held-out T=1 ")


@pytest.mark.parametrize("part", ["trainer", "inference", "node"])
def test_a_run_survives_the_death_of_any_part(demo, part: str) -> None:
    demo.start()
    demo.await_rl_step(7)
    demo.kill(part)
    code, output = demo.finish()
    assert code == 0, output
    assert demo.figures()["lost"] == 0


def test_a_stopped_run_goes_on_where_it_stopped(demo) -> None:
    demo.start("--set", "spec.phases.2.maxSteps=12")
    demo.await_rl_step(5)
    demo.process.send_signal(2)
    code, _ = demo.finish()
    assert code == 130
    steps_before = demo.rl_steps()

    demo.start("--set", "spec.phases.2.maxSteps=12")
    demo.finish()
    steps_after = demo.rl_steps()[len(steps_before) :]
    assert steps_after[0] == steps_before[-1] + 1
    assert steps_after[-1] == 12

"""Tasks of several steps: what is read of them, and the one reward that they have."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from etude.common.errors import UserError
from etude.common.harbor import task as harbor_task
from etude.common.harbor.step_rewards import combine_rewards
from etude.common.harbor.task import HarborTask
from etude.envserver.tasks import audit, show
from etude.envserver.tasks.formats import command

SETTINGS = (
    '[verifier]\ntimeout_sec = 60\nenv = {WHO = "all"}\n'
    '[[steps]]\nname = "01-cake"\nmin_reward = 0.5\n[steps.agent]\ntimeout_sec = 9\n'
    '[[steps]]\nname = "02-icing"\n[steps.verifier]\ntimeout_sec = 5\nenv = {WHO = "two"}\n'
)
FILES: Mapping[str, str] = {
    "task.toml": SETTINGS,
    "environment/Dockerfile": "FROM scratch\n",
    "environment/kitchen.txt": "an oven\n",
    "tests/test.sh": "echo 0 > /logs/verifier/reward.txt\n",
    "tests/help.sh": "true\n",
    "steps/01-cake/instruction.md": "Bake a cake.\n",
    "steps/01-cake/solution/solve.sh": "echo cake > cake.txt\n",
    "steps/02-icing/instruction.md": "Ice it.\n",
    "steps/02-icing/tests/test.sh": "grep -qx icing cake.txt; echo $((!$?)) > reward.txt\n",
    "steps/02-icing/workdir/sugar.txt": "sweet\n",
    "steps/02-icing/solution/solve.sh": "echo icing >> cake.txt\n",
}


def write(folder: Path, **changes: str) -> Path:
    for path, text in {"instruction.md": "All of it.\n", **FILES, **changes}.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return folder


def test_each_step_is_a_task_whose_tests_lie_over_the_shared_ones(tmp_path: Path) -> None:
    task = harbor_task.read_task(write(tmp_path / "cake"))
    first, second = task.steps
    assert (first.task.instruction, second.task.instruction) == ("Bake a cake.", "Ice it.")
    assert first.task.tests()["test.sh"] == FILES["tests/test.sh"].encode()
    assert second.task.tests()["test.sh"] == FILES["steps/02-icing/tests/test.sh"].encode()
    assert second.task.tests()["help.sh"] == b"true\n"
    assert (first.task.verifier_timeout_s, second.task.verifier_timeout_s) == (60, 5)
    assert "WHO='two'" in second.task.command
    assert second.workdir() == {"sugar.txt": b"sweet\n"}
    assert (first.min_reward, second.min_reward) == (0.5, 0)
    assert len({task.digest(), first.task.digest(), second.task.digest()}) == 3


def test_what_is_hidden_in_any_step_is_hidden_of_the_task(tmp_path: Path) -> None:
    folder = write(tmp_path / "cake")
    task = harbor_task.read_task(folder)
    assert "steps/02-icing/test.sh" in task.tests()
    assert "steps/01-cake/solve.sh" in task.solution()
    shown = show.render_task(task)
    assert "step 02-icing\n  Ice it." in shown
    assert "step 02-icing, brought into the workspace: sugar.txt" in shown
    (folder / "environment/notes").write_text(FILES["steps/01-cake/solution/solve.sh"])
    assert "notes" in {flaw.where for flaw in audit.audit_task(folder).flaws}


def test_an_import_keeps_the_steps_and_writes_what_people_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = SETTINGS.replace("min_reward = 0.5", "min_reward = {reward = 0.5}\nspeed = 3")
    settings = settings.replace("timeout_sec = 9", 'network_mode = "public"')
    folder = write(tmp_path / "cake", **{"task.toml": settings})
    (folder / "instruction.md").unlink()
    out = tmp_path / "out"
    assert command.main(["harbor", str(folder), "--out", str(out), "--files"]) == 0
    task = harbor_task.read_task(out / "cake")
    assert task.instruction == "Bake a cake.\n\nIce it."
    assert [step.min_reward for step in task.steps] == [0.5, 0]
    said = capsys.readouterr().err
    assert "steps.0.agent.network_mode = 'public', but sandboxes have no network" in said
    assert "key steps.0.speed is not known, and left out" in said
    assert task.unknown_keys == ()


REFUSED = {
    "two steps of one name": (
        {"task.toml": SETTINGS.replace("02-icing", "01-cake")},
        "two of them have one name",
    ),
    "a name that is a path": ({"task.toml": "[[steps]]\nname = '../x'\n"}, r"steps\.0\.name"),
    "a step without a request": ({"task.toml": "[[steps]]\nname = 'x'\n"}, "x/instruction.md"),
    "a threshold of another reward": (
        {"task.toml": SETTINGS.replace("min_reward = 0.5", "min_reward = {style = 1}")},
        "names style; a step has the one reward `reward` here",
    ),
    "a health check": (
        {"task.toml": SETTINGS + "[steps.healthcheck]\ncommand = 'true'\n"},
        "healthcheck",
    ),
    "a grade in a fork": (
        {
            "task.toml": SETTINGS.replace(
                "[verifier]", "[metadata]\netude_image = 'x'\netude_grade = 'fork'\n[verifier]", 1
            )
        },
        "each is graded by its files",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_steps_that_cannot_be_run_are_refused_by_their_key(case: str, tmp_path: Path) -> None:
    changes, what = REFUSED[case]
    with pytest.raises(UserError, match=what):
        harbor_task.read_task(write(tmp_path / "cake", **changes))


def test_a_step_without_tests_of_its_own_or_shared_ones_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "cake")
    (folder / "tests/test.sh").unlink()
    with pytest.raises(UserError, match=r"01-cake/tests/test\.sh  is missing"):
        harbor_task.read_task(folder)


@pytest.fixture
def cake(tmp_path: Path) -> HarborTask:
    return harbor_task.read_task(write(tmp_path / "cake"))


@pytest.mark.parametrize(
    ("strategy", "rewards", "expected"),
    [
        ("mean", [1.0, 0.5], 0.75),
        ("mean", [1.0], 0.5),
        ("mean", [], 0.0),
        ("mean", [0.25, 1.0], 0.25),
        ("final", [1.0, 0.5], 0.5),
        ("final", [1.0], 0.0),
        ("final", [0.25, 1.0], 0.25),
        ("final", [], 0.0),
    ],
)
def test_the_task_says_how_steps_make_one_reward(
    strategy: str, rewards: Sequence[float], expected: float, tmp_path: Path
) -> None:
    settings = f'multi_step_reward_strategy = "{strategy}"\n{SETTINGS}'
    task = harbor_task.read_task(write(tmp_path / "cake", **{"task.toml": settings}))
    assert combine_rewards(task, rewards) == expected


def test_more_rewards_than_steps_are_an_error(cake: HarborTask) -> None:
    with pytest.raises(ValueError, match="3 rewards for 2 steps"):
        combine_rewards(cake, [1.0, 1.0, 1.0])

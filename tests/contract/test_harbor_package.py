"""Our reading of task.toml against the models of the package that defines the format."""

import itertools
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import BaseModel
from tests.support.oracles import Oracle

from etude.common.harbor import task_file
from etude.common.harbor.step_rewards import combine_rewards
from etude.common.harbor.task import read_task, task_folders
from etude.demo.problems import Source
from etude.demo.task_folders import write

ROOT = Path(__file__).parents[2]
HARBOR = Oracle(
    requirements=("harbor==0.25.0",),
    # The package needs Python 3.12; Debian 13 and many machines have 3.13.
    python=os.environ.get("ETUDE_HARBOR_PYTHON", "3.13"),
    # It asks for a list of certificates that is younger than some mirrors.
    overrides=("certifi",),
)
SCRIPT = """
import json, sys, tomllib, typing, warnings
warnings.simplefilter("ignore")
from pydantic import BaseModel
from harbor.models.task import config
SECTIONS = {"": "TaskConfig", "task": "PackageInfo", "verifier": "VerifierConfig",
            "agent": "AgentConfig", "environment": "EnvironmentConfig",
            "solution": "SolutionConfig", "step": "StepConfig"}
for line in sys.stdin:
    text = json.loads(line)
    if text is None:
        print(json.dumps({name: sorted(getattr(config, model).model_fields)
                          for name, model in SECTIONS.items()}))
        continue
    try:
        config.TaskConfig.model_validate_toml(text)
        print(json.dumps(True))
    except ValueError:
        print(json.dumps(False))
"""
OURS: Mapping[str, type[BaseModel]] = {
    "": task_file.TaskFile,
    "task": task_file.PackageSection,
    "verifier": task_file.VerifierSection,
    "agent": task_file.AgentSection,
    "environment": task_file.EnvironmentSection,
    "solution": task_file.SolutionSection,
    "step": task_file.StepSection,
}
REWARDS = """
import json, logging, sys, warnings
warnings.simplefilter("ignore")
from types import SimpleNamespace
from harbor.models.task.config import MultiStepRewardStrategy, StepConfig
from harbor.models.trial.result import StepResult
from harbor.models.verifier.result import VerifierResult
from harbor.trial.multi_step import MultiStepTrial
class Trial(MultiStepTrial):
    config = logger = task = result = None
for line in sys.stdin:
    strategy, least, rewards = json.loads(line)
    trial = Trial.__new__(Trial)
    trial.config = SimpleNamespace(verifier=SimpleNamespace(disable=False))
    trial.logger = logging.getLogger("trial")
    chosen = MultiStepRewardStrategy(strategy)
    trial.task = SimpleNamespace(config=SimpleNamespace(multi_step_reward_strategy=chosen))
    trial.result = SimpleNamespace(step_results=[])
    for number, reward in enumerate(rewards):
        found = StepResult(step_name=str(number))
        found.verifier_result = VerifierResult(rewards={"reward": reward})
        trial.result.step_results.append(found)
        if trial._should_stop_after_step(StepConfig(name="x", min_reward=least), found):
            break
    print(json.dumps(trial._select_multi_step_reward().rewards["reward"]))
"""


def test_every_key_of_the_package_is_known_here() -> None:
    (theirs,) = HARBOR.answers(SCRIPT, [None])
    missing = {
        section: sorted(set(keys) - OURS[section].model_fields.keys())
        for section, keys in theirs.items()
        if set(keys) - OURS[section].model_fields.keys()
    }
    assert missing == {}


@pytest.mark.parametrize("strategy", ["mean", "final"])
def test_rewards_of_steps_that_all_ran_are_those_of_the_package(
    strategy: str, tmp_path: Path
) -> None:
    table = [list(each) for each in itertools.product((0.0, 0.25, 1.0), repeat=3)]
    for least in (None, 0.25, 1.0):
        key = "" if least is None else f"min_reward = {least}\n"
        steps = "".join(f"[[steps]]\nname = 's{number}'\n{key}" for number in range(3))
        folder = tmp_path / f"task-{least}"
        for path, text in {
            "task.toml": f"multi_step_reward_strategy = '{strategy}'\n{steps}",
            "instruction.md": "Do it.\n",
            "environment/a": "a\n",
            "tests/test.sh": "true\n",
            **{f"steps/s{number}/instruction.md": "Do it.\n" for number in range(3)},
        }.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        task = read_task(folder)
        theirs = HARBOR.answers(REWARDS, [[strategy, least, rewards] for rewards in table])
        assert theirs == [combine_rewards(task, rewards) for rewards in table]


WRONG = (
    "x = [",
    "[verifier]\ntimeout_sec = 'long'",
    "[environment]\nmemory = '2G'\nmemory_mb = 1",
    "[environment]\nmemory = 'much'",
    "[environment]\nos = 'plan9'",
    "[environment]\ncpus = nan",
    "[verifier]\nenvironment_mode = 'both'",
    "[agent]\nnetwork_mode = 'some'",
    "[task]\nname = 1",
    "[[steps]]\nname = '../x'",
    "[[verifier.collect]]\nservice = 'db'",
)


@pytest.mark.parametrize("text", WRONG)
def test_what_the_package_refuses_is_refused_here(text: str) -> None:
    assert HARBOR.answers(SCRIPT, [text]) == [False]
    with pytest.raises(ValueError):  # noqa: PT011 - two parsers, two sets of words
        task_file.parse_task_file(text)


def test_the_tasks_that_this_project_ships_and_makes_are_tasks_of_the_package(
    tmp_path: Path,
) -> None:
    (problem,) = Source(3).take("train", 1)
    write(problem, tmp_path / "made")
    shipped = [*task_folders(ROOT / "examples" / "tasks"), tmp_path / "made"]
    texts = [(folder / "task.toml").read_text() for folder in shipped]
    assert HARBOR.answers(SCRIPT, texts) == [True] * len(texts)

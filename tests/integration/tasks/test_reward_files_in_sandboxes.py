"""What test scripts leave in /logs/verifier, read back from the real sandbox."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support import needs

from etude.common.harbor import task
from etude.envserver.drivers.base import DriverUnavailableError
from etude.envserver.drivers.process.driver import ProcessDriver
from etude.envserver.host.grading.grader import Grader
from etude.envserver.host.result_cache import ResultCache
from etude.envserver.host.workspace_sources import WorkspaceSources
from etude.rewards.functions.verifier import BrokenVerifier, parse_answer
from etude.v1 import environments_pb2


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rewards")


@pytest.fixture
async def grader(scratch: Path) -> AsyncIterator[Grader]:
    driver = ProcessDriver(scratch)
    try:
        await driver.start()
    except DriverUnavailableError as error:
        if needs.is_required("sandbox", "qemu"):
            raise
        pytest.skip(str(error))
    yield Grader(driver, ResultCache())
    await driver.stop()


async def graded(grader: Grader, script: str) -> float | BrokenVerifier:
    """The reward of a script that is run as Harbor runs tests/test.sh."""
    job = environments_pb2.GradeJob(
        files=[environments_pb2.WorkspaceFile(path="test.sh", content=script.encode())],
        command=task.TEST_COMMAND,
        timeout_seconds=60,
        reward_path=task.REWARD_PATH,
    )
    source = await WorkspaceSources(scratch=Path("/nonexistent")).get("empty:")
    found = parse_answer(await grader.grade(source, job, template="t"))
    assert isinstance(found, float | BrokenVerifier)
    return found


REWARDS = {
    "echo 1 > /logs/verifier/reward.txt": 1.0,
    "echo 0.5 > /logs/verifier/reward.txt; exit 3": 0.5,
    "cd /logs/verifier; echo 0 > reward.txt; echo '{\"reward\": 1}' > reward.json": 1.0,
    "cd /logs/verifier; mkdir reward.txt; echo '{\"accuracy\": 0.25}' > reward.json": 0.25,
    'echo \'{"reward": 1, "style": 0}\' > /logs/verifier/reward.json': 1.0,
}


@pytest.mark.parametrize("script", REWARDS)
async def test_a_number_is_a_reward_whatever_the_script_s_exit_code(
    script: str, grader: Grader
) -> None:
    assert await graded(grader, script) == REWARDS[script]


NOT_REWARDS = {
    "nothing": "true",
    "an empty file": ": > /logs/verifier/reward.txt",
    "NaN": "echo nan > /logs/verifier/reward.txt",
    "infinity": "echo inf > /logs/verifier/reward.txt",
    "overflow": "echo 1e309 > /logs/verifier/reward.txt",
    "two numbers": "echo 1 or 1 > /logs/verifier/reward.txt",
    "a folder": "mkdir /logs/verifier/reward.txt",
    "a pipe": "mkfifo /logs/verifier/reward.txt",
    "a link to a number": "echo 1 > /tmp/r; ln -s /tmp/r /logs/verifier/reward.txt",
    "a link to a device": "ln -s /dev/zero /logs/verifier/reward.txt",
    "a linked folder": (
        "mkdir /tmp/v; echo 1 > /tmp/v/reward.txt; cd /logs; rmdir verifier; ln -s /tmp/v verifier"
    ),
    "a gigabyte of nothing": "truncate -s 1G /logs/verifier/reward.txt",
    "a number and 64 KiB": "(echo 1; head -c 65536 /dev/zero) > /logs/verifier/reward.txt",
    "a broken reward.json beside a good reward.txt": (
        "cd /logs/verifier; echo 1 > reward.txt; echo '{' > reward.json"
    ),
    "a linked reward.json beside a good reward.txt": (
        "cd /logs/verifier; echo 1 > reward.txt; ln -s reward.txt reward.json"
    ),
    "a dangling reward.json beside a good reward.txt": (
        "cd /logs/verifier; echo 1 > reward.txt; ln -s absent reward.json"
    ),
    "a folder reward.json beside a good reward.txt": (
        "cd /logs/verifier; echo 1 > reward.txt; mkdir reward.json"
    ),
    "a pipe reward.json beside a good reward.txt": (
        "cd /logs/verifier; echo 1 > reward.txt; mkfifo reward.json"
    ),
    "NaN in reward.json": "echo '{\"reward\": NaN}' > /logs/verifier/reward.json",
    "two keys in reward.json": 'echo \'{"a": 1, "b": 1}\' > /logs/verifier/reward.json',
}


@pytest.mark.parametrize("case", NOT_REWARDS)
async def test_anything_else_is_a_broken_verifier_and_never_a_reward(
    case: str, grader: Grader
) -> None:
    assert isinstance(await graded(grader, NOT_REWARDS[case]), BrokenVerifier)

"""Tasks mined from a small repository in the real sandbox, with real pytest."""

import asyncio
import importlib.util
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support import needs

from etude.common.harbor import task as harbor_task
from etude.envserver.drivers.base import DriverUnavailableError
from etude.envserver.tasks import runner, verify
from etude.envserver.tasks.mining import command
from etude.envserver.tasks.mining.journal import NAME

_RUNNER = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
_COMMAND = "PYTHONPATH=.deps python3 -m pytest -rA --tb=short -p no:cacheprovider"
_CART = '''\
"""A cart."""


def total(prices, limit):
    """Add prices up to a limit. Negative ones are refused."""
    found = 0
    for price in prices:
        if price < 0:
            raise ValueError(price)
        found += price
    return min(found, limit)


def join(names, last="and"):
    """Join names as a sentence does."""
    if len(names) < 2:
        return "".join(names)
    head = ", ".join(names[:-1])
    return f"{head} {last} {names[-1]}"
'''
_TESTS = """\
import cart, pytest
def test_total(): assert cart.total([1, 2], 10) == 3
def test_limit(): assert cart.total([7, 8], 10) == 10
def test_refusal():
    with pytest.raises(ValueError): cart.total([-1], 10)
"""
_OTHER_TESTS = """\
import cart
def test_join(): assert cart.join(["a", "b", "c"]) == "a, b and c"
def test_one(): assert cart.join(["a"]) == "a"
def test_none(): assert cart.join([]) == ""
"""


@pytest.fixture(autouse=True)
def _sandbox() -> None:
    async def start() -> None:
        async with runner.open_runner(None, []):
            pass

    try:
        asyncio.run(start())
    except DriverUnavailableError as error:
        if needs.is_required("sandbox"):
            raise
        pytest.skip(str(error))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "shop"
    files = {
        "pyproject.toml": "[project]\nname = 'shop'\n",
        ".gitignore": ".deps/\n",
        "cart.py": _CART,
        "tests/conftest.py": "import sys; sys.path.insert(0, '.')\n",
        "tests/test_total.py": _TESTS,
        "tests/test_join.py": _OTHER_TESTS,
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    for name in _RUNNER:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(spec.origin).parent, folder / ".deps" / name, ignore=ignore)
    _commit(folder)
    return folder


def _commit(folder: Path) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    for words in (("init", "-q"), ("add", "-A"), (*who, "commit", "-qm", "first")):
        subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


def _mine(repository: Path, out: Path, *words: str) -> int:
    given = ("--out", str(out), "--with", ".deps", "--test-command", _COMMAND, "--runs", "2")
    return command.main([str(repository), *given, *words])


def test_mined_tasks_are_proved_and_keep_their_tests_and_solutions_hidden(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mined"
    assert _mine(repository, out, "--tasks", "1") == 0
    first = capsys.readouterr().out.split()
    assert len(first) == 1
    # A later call keeps what there is, and goes on behind it.
    assert _mine(repository, out, "--tasks", "2") == 0
    assert {*capsys.readouterr().out.split()} > {*first}
    tried = [json.loads(line) for line in (out / NAME).read_text().splitlines()]
    assert len({line["mutation"] for line in tried if "mutation" in line}) == len(tried) - 2
    assert verify.main([str(out)]) == 0
    for folder in harbor_task.task_folders(out):
        task = harbor_task.read_task(folder)
        expected = json.loads(task.tests()["expected.json"])
        hidden = {path.removeprefix("files/") for path in task.tests() if path.startswith("files/")}
        workspace = harbor_task.read_files(task.environment)
        assert hidden
        assert hidden == {test.partition("::")[0] for test in expected["fail_to_pass"]}
        assert not hidden & {*workspace}
        assert workspace["cart.py"] != task.solution()["files/cart.py"] == _CART.encode()
        assert len(task.instruction) <= 400
        assert not [t for t in expected["fail_to_pass"] if t.split("::")[1] in task.instruction]


def test_a_repository_whose_suite_fails_is_refused_by_the_failing_test(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "tests/test_join.py").write_text("def test_sad(): assert False\n")
    subprocess.run(["git", "-C", str(repository), "add", "-A"], check=True)
    _commit(repository)
    assert _mine(repository, tmp_path / "mined") == 4
    error = capsys.readouterr().err
    assert "tests/test_join.py::test_sad" in error
    assert "--test-command" in error
    assert not list((tmp_path / "mined").glob("shop-*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task-image", "file:///l@sha256:" + "0" * 64), "for microVMs and gVisor only"),
        (("--driver", "gvisor", "--image", "m", "--task-image", "x"), "not an image by its digest"),
    ],
)
def test_an_image_of_mined_tasks_is_named_by_its_digest_and_needs_a_driver_of_images(
    repository: Path,
    tmp_path: Path,
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _mine(repository, tmp_path / "mined", *words) != 0
    assert message in capsys.readouterr().err

"""The small test runner and real pytest must give the same verdict."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from etude.agent import minitest

CORE = b"def add(a, b):\n    return a + b\n"
BROKEN = b"def add(a, b):\n    return a - b\n"
TESTS = b"from shop.core import add\n\ndef test_add():\n    assert add(1, 2) == 3\n"

REPOSITORIES: dict[str, dict[str, bytes]] = {
    "all pass": {"shop/core.py": CORE, "tests/test_repo.py": TESTS},
    "one fails": {
        "shop/__init__.py": b"",
        "shop/core.py": BROKEN,
        "tests/test_repo.py": TESTS + b"\ndef test_zero():\n    assert add(0, 0) == 0\n",
    },
    "import error": {"shop/core.py": b"import no_such_module\n", "tests/test_repo.py": TESTS},
    "syntax error": {"shop/core.py": b"def add(a, b)\n", "tests/test_repo.py": TESTS},
    "one of two files cannot be imported": {
        "shop/core.py": CORE,
        "tests/test_a.py": b"raise RuntimeError('no')\n",
        "tests/test_b.py": TESTS,
    },
    "missing name": {"shop/core.py": b"", "tests/test_repo.py": TESTS},
    "exit in a test": {"test_a.py": b"def test_a():\n    raise SystemExit(0)\n"},
    "no tests": {"shop/core.py": CORE, "tests/helpers.py": b""},
    "nothing at all": {},
    "classes": {
        "test_a.py": b"class TestA:\n    def test_x(self):\n        assert 0\n"
        b"    def helper(self):\n        assert 0\n"
        b"class TestB(TestA):\n    def test_y(self):\n        pass\n"
        b"class Other:\n    def test_z(self):\n        assert 0\n",
    },
    "unittest": {
        "test_a.py": b"import unittest\nclass Sums(unittest.TestCase):\n"
        b"    def setUp(self):\n        self.n = 3\n"
        b"    def test_n(self):\n        self.assertEqual(self.n, 3)\n"
        b"    def test_m(self):\n        self.assertEqual(self.n, 4)\n"
        b"    def test_s(self):\n        self.skipTest('later')\n",
    },
    "coroutine": {"test_a.py": b"async def test_a():\n    pass\n"},
    "asks for a fixture": {"test_a.py": b"def test_a(thing):\n    pass\n"},
    "default argument": {"test_a.py": b"def test_a(thing=1):\n    assert thing\n"},
    "helper beside the tests": {
        "tests/helpers.py": b"VALUE = 4\n",
        "tests/test_a.py": b"from helpers import VALUE\ndef test_a():\n    assert VALUE == 4\n",
    },
    "tests in a package": {
        "tests/__init__.py": b"",
        "tests/helpers.py": b"VALUE = 4\n",
        "tests/test_a.py": b"from tests.helpers import VALUE\nfrom . import helpers\n"
        b"def test_a():\n    assert VALUE == helpers.VALUE == 5\n",
    },
    "same name twice": {
        "a/test_a.py": b"def test_a():\n    pass\n",
        "b/test_a.py": b"def test_a():\n    pass\n",
    },
    "other file name": {
        "a/sum_test.py": b"def test_a():\n    assert 0\ndef testing():\n    pass\n"
    },
    "not looked at": {
        "build/test_a.py": b"def test_a():\n    assert 0\n",
        ".hidden/test_b.py": b"def test_b():\n    assert 0\n",
        "test_c.py": b"import os\ntest_values = [1]\ndef test_c():\n    assert os.sep\n",
    },
    "dataclasses and prints": {
        "shop/core.py": b"import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: 'int'\n",
        "tests/test_repo.py": b"from shop.core import P\nprint('loading')\n"
        b"def test_p():\n    print('running')\n    assert P(3) == P(3)\n",
    },
    "interrupted": {"test_a.py": b"def test_a():\n    raise KeyboardInterrupt\n"},
}

# One process imports pytest once and forks per repository: 25 cold starts would cost 20 CPU-s.
ORACLE = """
import io, json, os, sys, pytest
for folder in sys.argv[1:]:
    read, write = os.pipe()
    if os.fork() == 0:
        os.chdir(folder)
        sys.path.insert(0, folder)
        os.dup2(write, 1)
        code = pytest.main(["-q", "-rfE", "-p", "no:cacheprovider", "--rootdir", folder])
        sys.stdout.flush()
        os._exit(int(code))
    os.close(write)
    text = open(read).read()
    code = os.waitstatus_to_exitcode(os.wait()[1])
    lines = [line.split(" - ")[0] for line in text.splitlines()]
    bad = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    print(json.dumps([code, bad]))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("repositories")
    found = {}
    for number, (name, files) in enumerate(REPOSITORIES.items()):
        found[name] = base / f"r{number}"
        found[name].mkdir()
        for path, content in files.items():
            (found[name] / path).parent.mkdir(parents=True, exist_ok=True)
            (found[name] / path).write_bytes(content)
    return found


@pytest.fixture(scope="module")
def verdicts(folders: dict[str, Path]) -> dict[str, tuple[int, list[str]]]:
    command = [sys.executable, "-B", "-c", ORACLE, *map(str, folders.values())]
    # Plugins that happen to be installed cost a second per run and are no part of the verdict.
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=env)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: (code, bad) for name, (code, bad) in zip(folders, rows, strict=True)}


@pytest.mark.parametrize("name", REPOSITORIES)
def test_the_verdict_equals_real_pytests(
    name: str, folders: dict[str, Path], verdicts: dict[str, tuple[int, list[str]]]
) -> None:
    code, bad = verdicts[name]
    done = subprocess.run(
        [sys.executable, "-B", "-S", "-E", minitest.__file__],
        cwd=folders[name],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == code
    assert done.stderr == ""
    ours = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    if not any(line.startswith("ERROR ") for line in bad):
        assert ours == [f"FAILED {line.partition('::')[2]}" for line in bad]


@pytest.mark.parametrize("name", [n for n in REPOSITORIES if n != "interrupted"])
def test_in_the_process_and_in_a_folder_the_words_are_the_same(
    name: str, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = minitest.run(REPOSITORIES[name])

    assert minitest.main(folders[name]) == verdict.exit_code
    assert capsys.readouterr().out == verdict.output

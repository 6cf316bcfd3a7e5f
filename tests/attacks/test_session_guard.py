"""Verdicts of pytest under the guard, on honest code and on code that forges them."""

import importlib.resources
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

BROKEN = 3
TEST = "import code_\n\n\ndef test_one():\n    assert code_.one() == 1\n"
UNITTEST = """import unittest

import code_


class One(unittest.TestCase):
    def test_one(self):
        self.assertEqual(code_.one(), 1)
"""
TIMED = """import time

import code_


def test_speed():
    start = time.perf_counter()
    code_.one()
    assert time.perf_counter() - start < 0
"""
ONE = "def one():\n    return 1\n"
IMPORTER = """import sys

import pytest

caller = sys._getframe(1)
while caller.f_globals.get("__name__") != "test_it":
    caller = caller.f_back
"""
FORGERIES = {
    "skips": ("import unittest\n\n\ndef one():\n    raise unittest.SkipTest('later')\n", TEST),
    "skips by pytest": ("import pytest\n\n\ndef one():\n    pytest.skip('later')\n", TEST),
    "skips by text": (
        "def one():\n    exec('import unittest\\nraise unittest.SkipTest(1)')\n",
        TEST,
    ),
    "skips by text of the test's name": (
        "import sys\n\n\ndef one():\n    frame = sys._getframe(1)\n"
        "    text = 'import pytest; pytest.skip(str(1))'\n"
        "    exec(compile(text, frame.f_code.co_filename, 'exec'), frame.f_globals)\n",
        TEST,
    ),
    "marks the caller's tests": (
        IMPORTER + "caller.f_globals['pytestmark'] = pytest.mark.skip\n",
        TEST,
    ),
    "expects the caller's tests to fail": (
        IMPORTER + "caller.f_globals['pytestmark'] = pytest.mark.xfail\n",
        TEST,
    ),
    "makes the caller's tests": (
        IMPORTER + "\n\ndef generate(metafunc):\n"
        "    metafunc.function.pytestmark = [pytest.mark.skip.mark]\n\n\n"
        "caller.f_globals['pytest_generate_tests'] = generate\n",
        TEST,
    ),
    "expects to fail": ("import pytest\n\n\ndef one():\n    pytest.xfail('known')\n", TEST),
    "ends the session": ("import pytest\n\n\ndef one():\n    pytest.exit('done', 0)\n", TEST),
    "ends the process": ("import os\n\n\ndef one():\n    os._exit(0)\n", TEST),
    "passes every report": (
        "import _pytest.reports\n\n\n"
        "def made(cls, item, call):\n"
        "    call.excinfo = None\n"
        "    return original(item, call)\n\n\n"
        "original = _pytest.reports.TestReport.from_item_and_call\n"
        "_pytest.reports.TestReport.from_item_and_call = classmethod(made)\n\n\n"
        "def one():\n    return 2\n",
        TEST,
    ),
    "replaces code of the runner": (
        "import _pytest.python\n\n\n"
        "def run(self):\n    pass\n\n\n"
        "_pytest.python.Function.runtest.__code__ = run.__code__\n\n\n"
        "def one():\n    return 2\n",
        TEST,
    ),
    "calls no method": (
        "import unittest\n\nunittest.TestCase._callTestMethod = lambda self, method: None\n\n\n"
        "def one():\n    return 2\n",
        UNITTEST,
    ),
    "has a class of tests": (
        "import unittest\n\n\nclass Case(unittest.TestCase):\n"
        "    def assertEqual(self, *values):\n        pass\n\n\n"
        "unittest.TestCase = Case\n\n\ndef one():\n    return 2\n",
        UNITTEST,
    ),
    "replaces the caller's clock": (
        "import sys\n\n\nclass Clock:\n    perf_counter = staticmethod(lambda: 0.0)\n\n\n"
        "def one():\n    sys._getframe(1).f_globals['time'] = Clock\n",
        TIMED,
    ),
}
HONEST = {
    "solution": (ONE, TEST),
    "with a class": (ONE, UNITTEST),
    "with a mark": (
        ONE,
        "import pytest\n" + TEST + "\n\n@pytest.mark.skip\ndef test_two():\n    assert False\n",
    ),
    "with a test that skips": (
        ONE,
        "import pytest\n" + TEST + "\n\ndef test_two():\n    pytest.skip('no network')\n",
    ),
    "with a module that skips by its mark": (
        ONE,
        "import pytest\n\npytestmark = pytest.mark.skipif(False, reason='never')\n" + TEST,
    ),
    "with an expected failure": (
        ONE + "\n\ndef two():\n    raise ValueError\n",
        "import pytest\n" + TEST + "\n\n@pytest.mark.xfail\ndef test_two():\n    code_.two()\n",
    ),
    "with a clock of the test's": (
        ONE,
        "import time\n" + TEST + "\n\ndef test_two(monkeypatch):\n"
        "    monkeypatch.setattr(time, 'time', lambda: 0)\n"
        "    monkeypatch.setattr('test_it.time', None)\n",
    ),
    "with a process that it leaves": (
        "import subprocess\n\n\ndef one():\n"
        "    subprocess.Popen(['sleep', '60'], start_new_session=True)\n    return 1\n",
        TEST,
    ),
}


def run(
    folder: Path, code: str, test: str, more: Sequence[str] = ()
) -> "subprocess.CompletedProcess[str]":
    guard = importlib.resources.files("etude.common.harbor").joinpath("session_guard.py")
    files = {"code/code_.py": code, "hidden/test_it.py": test}
    files["guard/etude_session_guard.py"] = guard.read_text()
    for path, text in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    options = "-p etude_session_guard -p no:cacheprovider -c /dev/null --rootdir=../hidden"
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "../hidden/test_it.py", *options.split(), *more],
        cwd=folder / "code",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(folder / "guard")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_success_is_none(tmp_path: Path, name: str) -> None:
    done = run(tmp_path, *FORGERIES[name])
    assert done.returncode == BROKEN, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("etude: verifier error: ")


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_success_counts(tmp_path: Path, name: str) -> None:
    done = run(tmp_path, *HONEST[name])
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_process_that_waits_for_the_verifier_ends_with_the_tests(tmp_path: Path) -> None:
    code = f"""import os
import time

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
        time.sleep(60)
    os._exit(0)
os.wait()
while not os.path.exists({str(tmp_path / "pid")!r}):
    time.sleep(0.01)


def one():
    return 1
"""
    done = run(tmp_path, code, TEST)
    assert done.returncode == 0, done.stdout + done.stderr
    process = (tmp_path / "pid").read_text()
    assert process
    assert not Path("/proc", process).exists()


WORKERS = ("-n", "2")


@pytest.mark.parametrize("name", ["solution", "with an expected failure"])
def test_an_honest_success_of_workers_counts(tmp_path: Path, name: str) -> None:
    done = run(tmp_path, *HONEST[name], WORKERS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["skips", "ends the process", "has a class of tests"])
def test_a_forged_success_of_workers_is_none(tmp_path: Path, name: str) -> None:
    done = run(tmp_path, *FORGERIES[name], WORKERS)
    assert done.returncode in {1, BROKEN}, done.stdout + done.stderr

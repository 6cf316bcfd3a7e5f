"""Repairs of grading, by what a task's verifier starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from etude.common.harbor.grading_repairs import (
    GradingRepairs,
    keep_module_path,
    repair_grading,
)
from etude.common.harbor.task import HarborTask
from etude.envserver.host.grading.protected_paths import path_matcher

GUARD = ".etude/etude_session_guard.py"
PYTEST = {"test.sh": b"cd /workspace && pytest -q /tests/test_a.py\n", "test_a.py": b""}


def task(plugins: tuple[str, ...] | None = None) -> HarborTask:
    return HarborTask(
        task_id="t",
        folder=Path("/none"),
        instruction="Fix it.",
        command="bash /tests/test.sh",
        verifier_timeout_s=5.0,
        artefacts=(),
        unknown_keys=(),
        protected=("tools/**",),
        pytest_plugins=plugins,
    )


def test_hidden_tests_run_by_pytest_are_isolated_and_guarded() -> None:
    found = repair_grading(task(), PYTEST)
    assert GUARD in found.files
    assert "-c /dev/null --confcutdir=/tests" in found.environment["PYTEST_ADDOPTS"]
    assert found.environment["PYTEST_ADDOPTS"].endswith("-p etude_session_guard")
    assert "PYTEST_DISABLE_PLUGIN_AUTOLOAD" not in found.environment
    assert {"tools/**", "**/conftest.py"} <= {*found.protected}


@pytest.mark.parametrize(
    "script",
    [
        b"PYTHONPATH=src pytest /tests/test_a.py\n",
        b"python3 -I -m pytest /tests\n",
        b"python3 /tests/check.py\n",
    ],
)
def test_a_verifier_that_could_not_load_the_guard_gets_none(script: bytes) -> None:
    assert GUARD not in repair_grading(task(), {"test.sh": script}).files


@pytest.mark.parametrize(
    ("command", "is_guarded"),
    [
        ("PYTHONPATH=src python3 -m pytest", False),
        ("PYTHONPATH=$PYTHONPATH:src python3 -m pytest", True),
        ('export PYTHONPATH="${PYTHONPATH}:src"; pytest', True),
        ("PYTHONPATH=src:$PYTHONPATH pytest", True),
        ("python3 -I -m pytest", False),
        ("python3 -m pytest", True),
    ],
)
def test_a_command_in_json_decides_as_one_in_the_script_does(
    command: str, *, is_guarded: bool
) -> None:
    in_json = {"test.sh": b"python3 /tests/grade.py\n", "a.json": json.dumps([command]).encode()}
    assert (GUARD in repair_grading(task(), in_json).files) == is_guarded
    in_script = {"test.sh": command.encode()}
    assert (GUARD in repair_grading(task(), in_script).files) == is_guarded
    kept = {"test.sh": keep_module_path(command).encode()}
    assert (GUARD in repair_grading(task(), kept).files) == ("-I" not in command)


def test_a_repositorys_own_settings_stay_where_its_own_tests_run() -> None:
    tests = {"test.sh": b"cp /tests/test_a.py tests/ && pytest tests\n", "test_a.py": b""}
    assert "/dev/null" not in repair_grading(task(), tests).environment["PYTEST_ADDOPTS"]
    own = {**PYTEST, "pytest.ini": b"[pytest]\n"}
    assert "/dev/null" not in repair_grading(task(), own).environment["PYTEST_ADDOPTS"]


def test_a_list_of_plugins_turns_all_others_off() -> None:
    found = repair_grading(task(("pytest_asyncio",)), PYTEST).environment
    assert found["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] == "1"
    assert " -p pytest_asyncio" in found["PYTEST_ADDOPTS"]


def test_files_that_a_verifier_starts_are_protected() -> None:
    found = repair_grading(task(), {"test.sh": b"make check && python3 setup.py build\n"})
    assert {"{Makefile,makefile,GNUmakefile}", "**/*.{mk,mak}", "setup.py"} <= {*found.protected}
    assert "setup.py" not in repair_grading(task(), PYTEST).protected


def test_each_repair_can_be_off() -> None:
    off = GradingRepairs(
        runner_paths=False, test_paths=False, cache_paths=False, pins=False, session_guard=False
    )
    found = repair_grading(task(), PYTEST, off)
    assert found.files == PYTEST
    assert not found.protected
    assert not found.environment


def test_no_module_of_the_workspace_stands_in_for_one_that_pytest_starts_with() -> None:
    names = "; ".join(
        [
            "import sys, importlib, pytest",
            "from _pytest.config import default_plugins",
            "[importlib.import_module(f'_pytest.{name}') for name in default_plugins]",
            "print(*{name.partition('.')[0] for name in sys.modules} - {'__main__'})",
        ]
    )
    done = subprocess.run([sys.executable, "-c", names], capture_output=True, text=True, check=True)
    is_protected = path_matcher(repair_grading(task(), PYTEST).protected, "protected")
    started = [n for n in done.stdout.split() if n in sys.stdlib_module_names]
    started = [n for n in started if n[0] != "_" and n not in sys.builtin_module_names]
    assert len(started) > 50
    for name in [*started, "iniconfig", "pygments", "packaging"]:
        for path in (f"{name}.py", f"{name}/__init__.py", f"{name}.abi3.so"):
            assert is_protected(path), path
        assert not is_protected(f"shop/{name}.py")

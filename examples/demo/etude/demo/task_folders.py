"""A generated problem as a task folder in Harbor layout."""

import importlib.resources
import json
from collections.abc import Mapping
from pathlib import Path

from etude.demo.problems import Problem

VERIFIER = "python3 /tests/verify.py"

_TASK = """\
schema_version = "1.1"

[metadata]
category = "debugging"
bug_class = "{bug_class}"
issue = "{issue}"
etude_verifier = "{verifier}"
etude_artefacts = ["{package}/*.py"]

[verifier]
timeout_sec = 20.0

[agent]
timeout_sec = 120.0

[environment]
cpus = 1
memory_mb = 256
storage_mb = 64
allow_internet = false
"""

_DOCKERFILE = """\
FROM python:3.11-slim
WORKDIR /workspace
COPY {package} {package}
COPY tests tests
"""

TEST = f"#!/bin/bash\nexec {VERIFIER}\n"
SOLVE = '#!/bin/bash\nset -e\ncp -R "$(dirname "$0")/files/." .\n'


def write(problem: Problem, folder: Path) -> None:
    """Make the folder; it must not exist yet."""
    for path, content in files(problem).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def files(problem: Problem) -> dict[str, bytes]:
    """Every file of the task folder by relative path."""
    repository = problem.repository
    texts = {
        "task.toml": _TASK.format(
            bug_class=repository.bug.kind,
            issue=problem.issue,
            verifier=VERIFIER,
            package=repository.package,
        ),
        "instruction.md": problem.instruction + "\n",
        "environment/Dockerfile": _DOCKERFILE.format(package=repository.package),
        "tests/test.sh": TEST,
        "tests/verify.py": verifier_source(),
        "tests/cases.json": json.dumps({"modules": _hidden(problem)}) + "\n",
        "solution/solve.sh": SOLVE,
        f"solution/files/{repository.target.path}": repository.target.source(),
    }
    found = {path: text.encode() for path, text in texts.items()}
    found |= {f"environment/{path}": data for path, data in problem.workspace().items()}
    return found


def verifier_source() -> str:
    """The script that grades every generated task."""
    return importlib.resources.files(__package__).joinpath("grader.py").read_text()


def _hidden(problem: Problem) -> list[Mapping[str, object]]:
    pairs = zip(problem.repository.functions, problem.cases, strict=True)
    return [
        {
            "path": function.path,
            "function": function.name,
            "calls": [
                {"arguments": case.arguments, "expected": case.expected} for case in known.hidden
            ],
        }
        for function, known in pairs
    ]

"""A session task as a task folder in Harbor layout."""

import json
from pathlib import Path

from etude.demo import task_folders
from etude.demo.sessions.tasks import SessionTask

_TASK = """\
schema_version = "1.1"

[metadata]
category = "sessions"
family = "{family}"
symptom = "{symptom}"
cause = "{cause}"
etude_verifier = "{verifier}"
etude_artefacts = ["{package}/**"]

[verifier]
timeout_sec = 20.0

[agent]
timeout_sec = 1800.0

[environment]
cpus = 1
memory_mb = 256
storage_mb = 64
allow_internet = false
"""

_DOCKERFILE = """\
FROM python:3.11-slim
WORKDIR /workspace
COPY . .
"""


def write(task: SessionTask, folder: Path) -> None:
    """Make the folder; it must not exist yet."""
    for path, content in files(task).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def files(task: SessionTask) -> dict[str, bytes]:
    """Every file of the task folder by relative path."""
    texts = {
        "task.toml": _TASK.format(
            family=task.family.name,
            symptom=task.symptom,
            cause=task.cause,
            package=task.package,
            verifier=task_folders.VERIFIER,
        ),
        "instruction.md": task.request + "\n",
        "environment/Dockerfile": _DOCKERFILE,
        "tests/test.sh": task_folders.TEST,
        "tests/verify.py": task_folders.verifier_source(),
        "tests/cases.json": json.dumps({"modules": _hidden(task)}) + "\n",
        "solution/solve.sh": task_folders.SOLVE,
        "solution/answer.md": task.answer(),
    }
    texts |= {f"solution/files/{path}": text for path, text in task.reference.items()}
    texts |= {f"environment/{path}": text for path, text in task.workspace().items()}
    return {path: text.encode() for path, text in texts.items()}


def _hidden(task: SessionTask) -> list[dict[str, object]]:
    return [
        {
            "path": each.path,
            "function": each.function,
            "calls": [call._asdict() for call in each.hidden],
        }
        for each in task.functions
    ]

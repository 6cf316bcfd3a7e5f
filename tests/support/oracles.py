"""Other projects' packages in environments of their own: their pins do not fit beside ours."""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BUILD_LIMIT_S = 900
"""A cold download of 100 packages, on a busy machine."""
RUN_LIMIT_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """What to install, and for which Python."""

    requirements: tuple[str, ...]
    python: str = "3.11"
    overrides: tuple[str, ...] = ()
    """Requirements of theirs that are taken in any version."""
    is_alone: bool = False
    """Without what the packages ask for."""

    def interpreter(self) -> Path:
        """Python with the packages, made once; a test without a package index is skipped."""
        key = hashlib.sha256(repr(self).encode()).hexdigest()[:16]
        folder = Path.home() / ".cache" / "etude" / "oracles" / key
        if not folder.exists():
            self._make(folder)
        return folder / "bin" / "python"

    def _make(self, folder: Path) -> None:
        uv = shutil.which("uv", path=f"{ROOT / '.tools/bin'}:{os.environ['PATH']}")
        if uv is None:
            _miss("there is no uv")
            return
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        install = [uv, "pip", "install", "-q", "-p", str(partial / "bin" / "python")]
        install += ["--no-deps"] if self.is_alone else []
        folder.parent.mkdir(parents=True, exist_ok=True)
        if self.overrides:
            listed = partial.with_suffix(".txt")
            listed.write_text("\n".join(self.overrides) + "\n")
            install += ["--override", str(listed)]
        make = [uv, "venv", "-q", "--no-python-downloads", "--relocatable", "-p", self.python]
        for command in ([*make, str(partial)], [*install, *self.requirements]):
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=BUILD_LIMIT_S
            )
            if done.returncode:
                shutil.rmtree(partial, ignore_errors=True)
                _miss(f"{' '.join(self.requirements)}: {done.stderr[-300:]}")
        try:
            partial.rename(folder)
        except OSError:
            shutil.rmtree(partial)
            if not folder.exists():
                raise
            # Another process of tests made it meanwhile.

    def answers(self, script: str, questions: Sequence[object]) -> list[Any]:
        """What a script prints for each question: JSON lines in, JSON lines out."""
        done = subprocess.run(
            [str(self.interpreter()), "-c", script],
            input="".join(json.dumps(question) + "\n" for question in questions),
            capture_output=True,
            text=True,
            check=False,
            timeout=RUN_LIMIT_S,
        )
        assert done.returncode == 0, done.stderr[-2_000:]
        return [json.loads(line) for line in done.stdout.splitlines()]


def _miss(why: str) -> None:
    if os.environ.get("ETUDE_REQUIRE") == "oracles":
        pytest.fail(why, pytrace=False)
    pytest.skip(why)

"""A driver of microVMs in another process."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.envserver.images.built_image import BuiltImage

ROOT = Path(__file__).parents[3]


class Daemon:
    """Is asked over pipes, and may be killed."""

    def __init__(self, image: BuiltImage, scratch: Path, *, tsc_khz: int, lines: int) -> None:
        arguments = [str(image.folder), str(scratch), str(tsc_khz), str(lines)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.vm.vm_daemon", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.report: Mapping[str, Any] = self._answer() or {}

    def ask(self, *words: object) -> Any:
        """The answer, or None if it died."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def stop(self) -> int:
        self.process.communicate()
        return self.process.returncode

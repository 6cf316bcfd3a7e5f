"""The run that trains on feedback, as a process of the local runtime."""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from etude.common.blobs import Store, open_store
from etude.common.errors import Problem, UserError
from etude.common.run_folder.state import LocalState, read_state
from etude.common.weights import VersionId
from etude.common.weights.protocol.chain import newest_version
from etude.operator.local.child_process import ChildProcess

PATIENCE_S = 300.0
"""Engine and learner import for half a minute on idle cores."""
_LOOK_S = 0.2
T = TypeVar("T")


@dataclass(slots=True)
class TrainingRun:
    """A run with a phase of type Feedback; its folder is the store of the route, too."""

    folder: Path
    process: ChildProcess

    @classmethod
    def start(cls, manifest: Path, folder: Path, settings: Sequence[str]) -> "TrainingRun":
        """Start the local runtime of a run in a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "etude.operator.local"]
        command += ["--file", str(manifest.resolve()), "--dir", str(folder.resolve())]
        for setting in settings:
            command += ["--set", setting]
        log = folder / "demo-runtime.log"
        process = ChildProcess.start(command, env=os.environ, folder=folder, log=log)
        return cls(folder, process)

    @property
    def uri(self) -> str:
        return self.folder.resolve().as_uri()

    @property
    def store(self) -> Store:
        return open_store(self.uri)

    async def await_run(self) -> Mapping[str, Any]:
        """Wait for the run's name, uid and spec.

        Raises:
            UserError: it does not start.
        """
        state: LocalState = await self.await_value("run", lambda: read_state(self.folder))
        metadata: Any = state.run["metadata"]
        return {"name": metadata["name"], "uid": metadata["uid"], "spec": state.run["spec"]}

    async def await_version(self, besides: VersionId | None = None) -> VersionId:
        """Wait until the newest version is another one.

        Raises:
            UserError: none is published.
        """

        def find() -> VersionId | None:
            newest = newest_version(self.store)
            return None if newest == besides else newest

        return await self.await_value("version", find)

    async def await_value(self, what: str, find: Callable[[], T | None]) -> T:
        """Wait until something is there.

        Raises:
            UserError: the run ended, or it takes too long.
        """
        deadline_s = time.monotonic() + PATIENCE_S
        while (value := await asyncio.to_thread(find)) is None:
            if time.monotonic() > deadline_s:
                tail = self.process.log_tail()
                problem = f"there is no {what} after {PATIENCE_S:.0f} s: {tail}"
                raise UserError(Problem("Unreachable", problem, str(self.folder), "see logs/"))
            await asyncio.sleep(_LOOK_S)
        return value

    async def stop(self) -> None:
        """Stop the run; a checkpoint is saved first."""
        self.process.terminate()
        await self.process.wait()
